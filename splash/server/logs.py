"""Logs: lines for people, or one JSON object a line for programs. No text of a prompt or an answer is ever logged."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec

LOGGER = logging.getLogger("splash")


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message and further fields of a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


class TextFormatter(logging.Formatter):
    """The message, and further fields as key=value."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = getattr(record, "fields", {})
        return " ".join([super().format(record), *(f"{key}={value}" for key, value in fields.items())])


def configure_logging(format: str) -> None:
    """Write what SPLASH says to standard output, and warnings of all libraries and errors to standard error.

    Args:
        format: "text" or "json".
    """
    formatter = JsonFormatter() if format == "json" else TextFormatter()
    said, failed = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    said.addFilter(lambda record: record.levelno < logging.WARNING)
    failed.setLevel(logging.WARNING)
    for handler in (said, failed):
        handler.setFormatter(formatter)
    logging.basicConfig(handlers=[failed], level=logging.WARNING, force=True)
    LOGGER.setLevel(logging.INFO)
    LOGGER.handlers = [said]


def log(message: str, **fields: object) -> None:
    """Log an event with fields for programs."""
    LOGGER.info(message, extra={"fields": fields})
