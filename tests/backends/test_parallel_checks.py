"""Checks that fail in parallel loops of compiled steps: an error as on one thread, not the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from monograph.compat.inductor.checks.parallel import with_caught_checks
from monograph.compat.inductor.loading import compile_to_functions
from tests.support.warm import run_script

ONE_LOOP = """\
void kernel(const long* in, long* out)
{
    #pragma omp parallel num_threads(2)
    {
        int tid = omp_get_thread_num();
        {
            #pragma omp for
            for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(9L); x0+=static_cast<int64_t>(1L))
            {
                AOTI_TORCH_CHECK(in[x0] < 9L, "in bounds: {");
                out[x0] = in[x0];
            }
        }
    }
}
"""

CAUGHT = """\
void kernel(const long* in, long* out)
{
    std::exception_ptr monograph_raised0;
#pragma omp parallel num_threads(2)
    {
        int tid = omp_get_thread_num();
        {
            #pragma omp for
            for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(9L); x0+=static_cast<int64_t>(1L))
            {
try
{
                MONOGRAPH_AOTI_TORCH_CHECK(in[x0] < 9L, "in bounds: {");
                out[x0] = in[x0];
            }
catch (...)
{
#pragma omp critical(monograph_raised)
{ if (!monograph_raised0) monograph_raised0 = std::current_exception(); }
}
}
        }
    }
if (monograph_raised0) std::rethrow_exception(monograph_raised0);
}
"""


def test_each_iteration_catches_what_the_region_throws_when_it_has_ended():
    made = with_caught_checks(ONE_LOOP)
    assert made.startswith("#include")
    assert made.endswith(CAUGHT)


CHECK = 'AOTI_TORCH_CHECK(in[x0] < 9L, "in bounds: {");'


@pytest.mark.parametrize(
    "kernel",
    [
        ONE_LOOP.replace(CHECK, ""),
        ONE_LOOP.replace(CHECK, f"// {CHECK}"),
        ONE_LOOP.replace("#pragma omp parallel num_threads(2)", "").replace("#pragma omp for", ""),
        ONE_LOOP.replace("omp for", "omp for simd"),
        ONE_LOOP.replace("omp for", "omp for collapse(2)"),
        ONE_LOOP.replace("{\n                AOTI", "AOTI").replace("x0];\n            }", "x0];"),
        ONE_LOOP.replace("    #pragma omp parallel", "    if (in)\n    #pragma omp parallel"),
        ONE_LOOP + "}",
        ONE_LOOP[:-2],
        "",
    ],
    ids=["no check", "a comment", "serial", "simd", "depth", "no braces", "no block", "more", "less", "none"],
)
def test_what_needs_no_change_or_is_written_otherwise_stays_as_it_is(kernel):
    assert with_caught_checks(kernel) == kernel


# A region of each kind that Inductor writes. `in` tells at which of five checks to fail, `out` what was run.
KERNEL = """
// it's a comment {
void kernel(int in, long* out)
{
    for (int outer = 0; outer < 2; outer++)
    {
        long sum = 0;
        long sum_arr[2] = {0, 0};
        #pragma omp parallel num_threads(2)
        {
            int tid = omp_get_thread_num();
            long sum_local = 0;
            #pragma omp for
            for(long x0=0; x0<10; x0+=1)
            {
                {
                    if (x0 < 8)
                    {
                        auto tmp = [&]
                        {
                            AOTI_TORCH_CHECK(in != 0 || x0 % 4 != 3, "check 0");
                            return x0;
                        }
                        ()
                        ;
                        sum_local += tmp;
                    }
                    if (x0 >= 8)
                    {
                        AOTI_TORCH_CHECK(in != 1, "check 1");
                        sum_local += x0;
                    }
                }
            }
            sum_arr[tid] = sum_local;
        }
        for (int tid = 0; tid < 2; tid++)
        {
            sum += sum_arr[tid];
        }
        out[0] += sum;
    }
    #pragma omp parallel num_threads(2)
    {
        int tid = omp_get_thread_num();
        {
            #pragma omp for collapse(2)
            for(long x0=0; x0<4; x0+=1)
            {
                for(long x1=0; x1<3; x1+=1)
                {
                    #pragma GCC ivdep
                    for(long x2=0; x2<5; x2+=1)
                    {
                        AOTI_TORCH_CHECK(in != 2 || x1 != 1, "check 2");
                    }
                    if (x0 == 3 && x1 == 2) out[1] += 1;
                }
            }
        }
        #pragma omp single
        {
            {
                AOTI_TORCH_CHECK(in != 3, "check 3");
                out[2] += 1;
            }
        }
        {
            #pragma omp for
            for(long x0=0; x0<2; x0+=1)
            {
                out[3 + x0] += 1;
            }
        }
        {
            #pragma omp for
            for(long x0=0; x0<2; x0+=1)
            {
                (in != 4 ? 0 : (throw std::runtime_error("check 4"), 0));
                out[5 + x0] += 1;
            }
        }
    }
    out[7] += 1;
}
"""

AROUND = """
#include <omp.h>
#include <stdexcept>
#define AOTI_TORCH_CHECK(condition, text) if (!(condition)) { throw std::runtime_error(text); }
%s
extern "C" int call(int in, long* out)
{
    try { kernel(in, out); } catch (const std::runtime_error& error) { return error.what()[6] - '0'; }
    return -1;
}
"""

CALLS = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for which in range(-1, 5):
    for again in range(20):
        out = (ctypes.c_long * 8)()
        told = library.call(which, out)
        if not again:
            print(told, *out)
"""

RUN = """\
-1 90 1 1 1 1 1 1 1
0 0 0 0 0 0 0 0 0
1 0 0 0 0 0 0 0 0
2 90 1 0 0 0 0 0 0
3 90 1 0 0 0 0 0 0
4 90 1 1 1 1 0 0 0
"""


def test_what_follows_a_check_that_failed_is_left_out(tmp_path):
    library = tmp_path / "kernel.so"
    compile_to_functions(AROUND % with_caught_checks(KERNEL), library)
    done = subprocess.run([sys.executable, "-c", CALLS, library], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (RUN, 0), done.stderr


STEPS = """
import copy
import torch
from torch import nn
import monograph as mg
torch.set_num_threads(2)
torch.manual_seed(0)

class Lookup(mg.Graph):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 64)

    def build(self, words):
        return torch.relu(self.table(words)).sum(1)

lookup = Lookup()
lookup.config.backend("inductor")
words = torch.randint(0, 10, (8, 400))
with torch.no_grad():
    lookup.table.weight.mul_(64).round_().div_(64)  # sums of these are exact in any order
    lookup(words)
    try:
        lookup(torch.full((8, 400), 10))
    except IndexError as error:
        print("lookup:", type(error).__name__, str(error).splitlines()[0])
    torch.testing.assert_close(lookup(words), torch.relu(lookup.table(words)).sum(1))

def training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 20), nn.Flatten(0, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def numbers(step, model):
    return [step(words, labels).detach(), *(parameter.detach().clone() for parameter in model.parameters())]

words, labels = torch.randint(0, 100, (16, 200)), torch.randint(0, 20, (3200,))
wrong = labels.clone()
wrong[777] = 20
model, optimizer = training()
step = mg.train_graph(model, nn.CrossEntropyLoss(), optimizer)
step.config.backend("inductor")
first = numbers(step, model)
saved = copy.deepcopy(step.state_dict())
for inputs in ((words, wrong), (words + 90, labels)):
    for call in (inputs, (words, labels)):
        try:
            step(*call)
        except IndexError as error:
            print("step:", str(error).splitlines()[0])
    step.load_state_dict(saved)
second = numbers(step, model)

plain, optimizer = training()
def eager(words, labels):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(plain(words), labels)
    loss.backward()
    optimizer.step()
    return loss
torch.testing.assert_close([first, second], [numbers(eager, plain), numbers(eager, plain)])
"""


@pytest.mark.long
def test_a_wrong_index_or_label_is_an_error_and_the_next_good_call_is_right(tmp_path):
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    done = run_script([str(script)], cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout.splitlines()
    target = "step: Target 20 is out of bounds."
    word = "step: index out of range in self"
    assert told == ["lookup: IndexError index out of range in self", target, word], done.stdout
