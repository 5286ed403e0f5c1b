"""Quotients of sizes stand before the loops of a kernel, and mean the same."""

import re

from monograph.compat.inductor.written.size_quotients import with_quotients_first

HEAD = 'extern "C" void kernel(float* out, const int64_t ks0)\n{\n    std::atomic<int> inductor_cpu_integer_div_error{0};'


def quotient(dividend: str, divisor: str) -> str:
    return f"c10::div_floor_integer(static_cast<int64_t>({dividend}), static_cast<int64_t>({divisor}))"


def value(code: str, **names: int) -> int:
    text = re.sub(r"static_cast<int64_t>|(?<=\d)L", "", code).replace("c10::div_floor_integer", "quotient")
    known = {**names, "quotient": lambda one, other: one // other}
    return int(eval(text, known))


def test_quotients_of_sizes_are_computed_once_and_mean_the_same() -> None:
    inner = quotient("(-1L) + ks0", "4L")
    index = f"x0 + {quotient('1L + ' + inner, '2L')}*x0 + {quotient('x0', inner)} + {inner}"
    kernel = f"{HEAD}\n    out[{index}] = 0;\n}}"
    made = with_quotients_first(kernel)
    lines = re.findall(r"const int64_t (kq\d+) = (.*);", made)
    used = re.search(r"out\[(.*)\]", made)
    assert used is not None
    assert len(lines) == 2, "one for each, named once"
    assert used[1].count("div_floor_integer") == 1, "that of the index stays in its loop"
    for size in (9, 10, 57, 224):
        known = {"ks0": size, "x0": 7}
        for name, text in lines:
            known[name] = value(text, **known)
        assert value(used[1], **known) == value(index, ks0=size, x0=7)


def test_what_may_fail_or_is_written_otherwise_stays() -> None:
    by_size = f"{HEAD}\n    out[{quotient('ks0', '1L + ks0')}] = 0;\n}}"
    assert with_quotients_first(by_size) == by_size, "a divisor that may be 0"
    without = f"void kernel(const int64_t ks0) {{ out[{quotient('ks0', '4L')}] = 0; }}"
    assert with_quotients_first(without) == without
    assert with_quotients_first("") == ""
