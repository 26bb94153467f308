"""Ctrl-C in a search: it ends at once, not when the library's own limit is reached."""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest
from ortools.sat.python import cp_model

from planner.solver.solve import Limits, _searched, _solver


def split_markets(customers: int, products: int) -> cp_model.CpModel:
    """Customers divided so that each half buys the same of every product: small, and very hard to decide."""
    draw, model = random.Random(1), cp_model.CpModel()
    mine = [model.new_bool_var("") for _ in range(customers)]
    for _ in range(products):
        bought = [draw.randrange(100) for _ in mine]
        model.add(sum(n * one for n, one in zip(bought, mine, strict=True)) == sum(bought) // 2)
    return model


def test_an_interrupt_stops_the_search() -> None:
    solver = _solver(cp_model, Limits(1000.0, 600.0))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            _searched(solver, split_markets(50, 6))
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
    assert solver.wall_time < 300  # long before its limit
