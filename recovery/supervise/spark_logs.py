"""Keep what Spark and py4j print of a failure that we expect, or tell ourselves, off the user's screen.

A task that finds its state missing is an expected outcome: the supervisor restores it and goes on. Spark prints the
exception some times over, with the stacks of the JVM, and py4j once more: users think that the job failed. Filters are
put on exactly the loggers concerned, for exactly these events, and nothing else of them is lost:

* py4j's: our own exceptions that leave `publish`. The supervisor has the error and logs or raises it;
* `TaskSetManager`: a task whose text carries the mark of an error that is restored (`backend.boundary`);
* `Executor`, in the driver's own JVM: events of the query's tasks (by a property that travels with its jobs). Of each
  the scheduler's logger says the same;
* Hadoop's `Shell`: that the stop of a query interrupted one of its commands, with the stack;
* `MicroBatchExecution`: the end of this query by its id, which the supervisor logs in one line.

Where log4j is not what Spark logs with, nothing is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from backend.boundary import token
from backend.spark.session.jvm import context_of, gateway, jvm_of
from recovery.failures import RESTORABLE

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

log = logging.getLogger("rewind.supervisor")

PROPERTY = "mdc.rewind"
"""Local property of the query's jobs; Spark gives it to the log events of their tasks."""
_PY4J = ("py4j.clientserver", "py4j.java_gateway")
_EXECUTOR = "org.apache.spark.executor.Executor"
_SCHEDULER = "org.apache.spark.scheduler.TaskSetManager"
_SHELL, _INTERRUPTED = "org.apache.hadoop.util.Shell", r"(?s)Interrupted while joining on: .*"
_EXECUTION = "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution"
_put: set[tuple[int, str, str | None]] = set()
"""Filters that are there: log4j's configuration, logger, pattern."""


class MicroBatchFailed(Exception):
    """A micro-batch failed; the supervisor has the error. Spark and py4j get this one, a line without a stack."""


def _is_others(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (MicroBatchFailed, InterruptedError))


@contextmanager
def reported_by_us(spark: SparkSession) -> Iterator[None]:
    """Start a query in a block such that Spark does not print what is expected of its tasks."""
    for name in _PY4J:
        logging.getLogger(name).addFilter(_is_others)  # the same one again changes nothing
    context = context_of(spark)
    before = context.getLocalProperty(PROPERTY)
    codes = "|".join(kind.__name__ for kind in RESTORABLE)
    _deny(context, _SCHEDULER, rf'(?s).*\[rewind-mark-1 {token()}\] \{{"code": "({codes})".*')
    _deny(context, _EXECUTOR, None)
    _deny(context, _SHELL, _INTERRUPTED)
    context.setLocalProperty(PROPERTY, token())
    try:
        yield
    finally:
        context.setLocalProperty(PROPERTY, before)


def end_reported_by_us(spark: SparkSession, query_id: str) -> None:
    """Let Spark not print the end of a query: the supervisor does, in one line."""
    _deny(context_of(spark), _EXECUTION, rf"(?s)Query .*\bid = {query_id}, .* terminated with error.*")


def _deny(context: SparkContext, name: str, pattern: str | None) -> None:
    """Put a filter on a logger of the JVM, once: what a pattern matches, or without one what our tasks log."""
    jvm = jvm_of(context)
    try:
        log4j = jvm.org.apache.logging.log4j
        core, logging_context = log4j.core, log4j.LogManager.getContext(False)
        deny, neutral = core.Filter.Result.DENY, core.Filter.Result.NEUTRAL
        if pattern is not None:
            made = core.filter.RegexFilter.createFilter(pattern, None, False, deny, neutral)
        else:
            pairs = gateway().new_array(core.util.KeyValuePair, 1)
            pairs[0] = core.util.KeyValuePair(PROPERTY, token())
            made = core.filter.ThreadContextMapFilter.createFilter(pairs, "or", deny, neutral)
        configuration = logging_context.getConfiguration()
        logger = configuration.getLoggerConfig(name)
        if logger.getName() != name:  # of a logger above it
            logger = core.config.LoggerConfig(name, None, True)
            configuration.addLogger(name, logger)
        key = (configuration.hashCode(), name, pattern)
        if key not in _put:
            logger.addFilter(made)
            _put.add(key)
        logging_context.updateLoggers()
    except Exception as error:  # another logging system, or another log4j: as loud as before
        log.debug("Spark's logger %s is left as it is: %s", name, error)
