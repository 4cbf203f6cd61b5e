"""Benchmarks of inturn. A benchmark prints a figure, a bound or peer measured in the same run, and the ratio of the
two.

    inturn bench all                 # or `make bench`: all benchmarks, full length
    inturn bench key-order --quick   # a benchmark, with less work
    inturn bench all --json          # a JSON object per benchmark

`catalog` lists the benchmarks by name; a module per benchmark has a function `run(quick)` that returns a `BenchReport`.
Modules `*_child` are processes that benchmarks start (see `child`): servers, producers, consumers and bare peers.
Figure and peer are measured in turns in the same run: compare ratios, not figures of different machines.
"""
