"""When a child that died is started again. Knows times and exit codes; starts nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

CONFIGURATION_ERROR = 2

_WINDOW_S = 60.0
_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 8.0
_PATIENT_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the child again after `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Starting it again would not help; `why` says so."""

    why: str


@dataclass(slots=True)
class RestartPolicy:
    """One child's record.

    A child that was ready is started again at once the first time, then with growing pauses. One
    that dies `max_failures` times in a row before it is ready is given up, and so is one that
    refuses its settings (exit code 2) without ever having been ready. A child that the rest can do
    without is not: it is tried for as long as the rest works, with pauses of up to a minute.
    """

    max_failures: int = 5
    num_failures: int = 0
    _ever_ready: bool = False
    _deaths: list[float] = field(default_factory=list)

    @property
    def hopeless(self) -> bool:
        """True when it has failed so often that a needed child would have been given up."""
        return self.num_failures >= self.max_failures

    def ready(self) -> None:
        """The child serves."""
        self.num_failures = 0
        self._ever_ready = True

    def died(
        self, now_s: float, code: int, *, was_ready: bool, needed: bool = True
    ) -> Restart | GiveUp:
        """What to do about a child that ended at `now_s` with exit code `code`."""
        if not was_ready:
            self.num_failures += 1
        if code == CONFIGURATION_ERROR and not self._ever_ready:
            return GiveUp("it refused to start")
        if self.num_failures >= self.max_failures and not needed:
            over = min(self.num_failures - self.max_failures, 16)
            return Restart(min(_MAX_DELAY_S * 2**over, _PATIENT_DELAY_S))
        if self.num_failures >= self.max_failures:
            return GiveUp(f"it died {self.num_failures} times in a row before it was ready")
        self._deaths = [at for at in self._deaths if now_s - at < _WINDOW_S]
        self._deaths.append(now_s)
        recent = len(self._deaths) - 1
        if recent == 0:
            return Restart(0.0)
        return Restart(min(_FIRST_DELAY_S * 2 ** (recent - 1), _MAX_DELAY_S))


def exit_words(code: int) -> str:
    """An exit code in words: ``exit code 1`` or ``signal SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    import signal

    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
