"""How the threads that share one operation wait for each other."""

from __future__ import annotations

import os

WAITING = "OMP_WAIT_POLICY"


def wait_asleep() -> None:
    """Let threads sleep while they wait, unless the user says otherwise; call it before torch is imported.

    By default they spin. Where a core is shared with anything else, a thread then spins away the time in which the one
    it waits for could run: with two threads on two busy cores a picture took 2 s instead of 0.15.
    """
    os.environ.setdefault(WAITING, "passive")
