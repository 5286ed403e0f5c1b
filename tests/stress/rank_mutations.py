"""Faults in what several processes do together."""

from __future__ import annotations

from tests.stress.mutations import Mutation

RANKS: tuple[Mutation, ...] = (
    Mutation("distributed", "gradient.mul(1.0 / replica.size)", "gradient.mul(1.0)", ("distributed/test_data_parallel.py",), is_new=True),
    Mutation("distributed", "        if id(parameter) not in self._done:\n", "        if True:\n", ("distributed/test_data_parallel.py",), is_new=True),
    Mutation("distributed", "            if replica.wants_all and replica.size > 1 and missing:\n", "            if False:\n", ("distributed/test_data_parallel.py",), is_new=True),
    Mutation("distributed", "        if len(set(texts)) > 1:\n", "        if False:\n", ("distributed/test_faults.py",), is_new=True),
    Mutation("distributed", "        if len(set(digests)) == 1:\n", "        if digests:\n", ("distributed/test_agreement.py",), is_new=True),
    Mutation("internals", "            except NonfiniteError as error:  # all have it: the flag is that of all\n                nonfinite = error\n", "            except ZeroDivisionError as error:\n                nonfinite = error\n", ("distributed/test_data_parallel.py",), is_new=True),
    Mutation("distributed", "        if len(set(said)) > 1:\n", "        if False:\n", ("distributed/test_rank_programs.py",), is_new=True),
    Mutation("distributed", "            if waiting and not any(moved):\n", "            if False:\n", ("distributed/test_rank_programs.py",), is_new=True),
    Mutation("distributed", "    if known.joined is not None and not covers(known.joined):\n", "    if False:\n", ("distributed/test_rank_programs.py",), is_new=True),
    Mutation("distributed", '    "all_reduce": 2,', '    "all_reduce": 1,', ("distributed/test_planning.py",), is_new=True),
)  # fmt: skip
