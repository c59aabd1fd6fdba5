"""Interleaved rounds: every contestant once per round, so that a busy machine slows all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Times:
    """Seconds per round of each contestant."""

    use_cpu_clock: bool
    """Process CPU time, meaningful with one thread only: it hardly notices the machine's other
    load. Otherwise wall time."""
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def run_round(
        self, contestants: dict[str, Callable[[], object]], clean_up: Callable[[], None]
    ) -> None:
        """Every contestant once; the order turns round each time."""
        clock = time.process_time if self.use_cpu_clock else time.perf_counter
        names = list(contestants)
        rounds_done = len(self.seconds.get(names[0], []))
        for name in names if rounds_done % 2 == 0 else reversed(names):
            gc.collect()
            start = clock()
            contestants[name]()
            self.seconds.setdefault(name, []).append(clock() - start)
            clean_up()
