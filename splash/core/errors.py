"""Every exception that SPLASH raises on purpose.

    SplashError
    ├── ConfigError          a launch option is wrong            (also a ValueError)
    ├── CheckpointError      a model directory cannot be served  (also a ValueError)
    ├── RequestError         a request cannot be served          (also a ValueError)
    ├── GrammarError         an output could not be kept to its grammar
    ├── DeadlineError        a request was not done in its time
    ├── CapacityError        something does not fit in memory
    ├── PlatformUnavailable  the hardware asked for is not here
    ├── SwitchError          a change of layout was refused or abandoned
    └── WorkerError          a rank died, hung or disagreed

User errors name the field, the value and what would be accepted; `field` carries the name by itself so that a
front end can point at it.
"""

from __future__ import annotations


class SplashError(Exception):
    """Base of every exception raised on purpose by SPLASH."""


class ConfigError(SplashError, ValueError):
    """A launch option has a value that cannot work. `field` is the option as the user types it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class CheckpointError(SplashError, ValueError):
    """A model directory is missing, damaged or of an architecture that is not supported."""


class RequestError(SplashError, ValueError):
    """A request cannot be served as asked. `field` is the request's parameter."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class GrammarError(SplashError):
    """A request's output could not be kept to the grammar asked for; nobody else's output is affected."""


class DeadlineError(SplashError):
    """A request was not done within the time that it or the server allows, and has been dropped."""


class CapacityError(SplashError):
    """Something does not fit in memory; the message carries the numbers."""


class PlatformUnavailable(SplashError):
    """The hardware asked for is not usable here; the message says what is missing and what to do instead."""


class SwitchError(SplashError):
    """A switch was refused or abandoned; the source layout goes on serving.

    `rank` is the rank at fault, None when it is nobody's. `recoverable` False means that the cache is lost, and running
    requests are computed again from their tokens.
    """

    def __init__(self, message: str, rank: int | None = None, *, recoverable: bool = True) -> None:
        super().__init__(message)
        self.rank = rank
        self.recoverable = recoverable


class WorkerError(SplashError):
    """A rank died, hung or disagreed with its peers. `rank` is the rank at fault, or None when unknown."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
