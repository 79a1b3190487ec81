"""Benchmarks: each a module with `run(quick) -> list[Result]`, all started by `bin/bench NAME`."""
