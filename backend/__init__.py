"""Rewind's public names: exactly-once window state for PySpark.

Names that need Spark are imported when they are first used, so `import backend` stays light in every Python worker.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# at once: its module has the same name, and would be found instead of it once another module had imported that
from backend.policies import policies

if TYPE_CHECKING:
    from backend.aggregates import (
        Aggregate,
        approx_distinct,
        collect_list,
        collect_set,
        count,
        first,
        last,
        max_,
        mean,
        median,
        min_,
        over_all,
        quantile,
        reducer,
        stddev,
        sum_,
        top_k,
        variance,
    )
    from backend.joins import join_spec
    from backend.operators.contexts import AutomaticContext, Message, StandaloneContext
    from backend.operators.join_contexts import AutomaticJoin, StandaloneJoin
    from backend.operators.spec import window_spec
    from backend.process import (
        key_value_store,
        list_state,
        map_state,
        session_store,
        value_state,
        window_store,
    )
    from backend.sinks import foreach_sink, kafka_sink, parquet_sink
    from backend.sinks.kafka_rows import Dedupe
    from backend.sources.archive import archive
    from backend.sources.kafka import kafka
    from backend.sources.kafka_settings import KafkaSettings
    from backend.spark.join import join
    from backend.spark.stream import stream
    from backend.stores.key_value_store import KeyValueStore
    from backend.stores.memory_window_store import in_memory_window_store
    from backend.stores.session_store import SessionKey, SessionStore
    from backend.stores.session_windows import SessionWindows
    from backend.stores.standalone import StoreSet
    from backend.stores.state_variables import ListState, MapState, ValueState
    from backend.stores.window_store import WindowStore
    from backend.windows import hopping, session, sliding, tumbling

_HOMES = {
    "backend.aggregates": (
        "Aggregate",
        "approx_distinct",
        "collect_list",
        "collect_set",
        "count",
        "first",
        "last",
        "max_",
        "mean",
        "median",
        "min_",
        "over_all",
        "quantile",
        "reducer",
        "stddev",
        "sum_",
        "top_k",
        "variance",
    ),
    "backend.joins": ("join_spec",),
    "backend.operators.contexts": ("AutomaticContext", "Message", "StandaloneContext"),
    "backend.operators.join_contexts": ("AutomaticJoin", "StandaloneJoin"),
    "backend.operators.spec": ("window_spec",),
    "backend.policies": ("policies",),
    "backend.process": (
        "key_value_store",
        "list_state",
        "map_state",
        "session_store",
        "value_state",
        "window_store",
    ),
    "backend.sinks": ("foreach_sink", "kafka_sink", "parquet_sink"),
    "backend.sinks.kafka_rows": ("Dedupe",),
    "backend.sources.archive": ("archive",),
    "backend.sources.kafka": ("kafka",),
    "backend.sources.kafka_settings": ("KafkaSettings",),
    "backend.spark.join": ("join",),
    "backend.spark.stream": ("stream",),
    "backend.stores.key_value_store": ("KeyValueStore",),
    "backend.stores.memory_window_store": ("in_memory_window_store",),
    "backend.stores.session_store": ("SessionKey", "SessionStore"),
    "backend.stores.session_windows": ("SessionWindows",),
    "backend.stores.standalone": ("StoreSet",),
    "backend.stores.state_variables": ("ListState", "MapState", "ValueState"),
    "backend.stores.window_store": ("WindowStore",),
    "backend.windows": ("hopping", "session", "sliding", "tumbling"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Aggregate",
    "AutomaticContext",
    "AutomaticJoin",
    "Dedupe",
    "KafkaSettings",
    "KeyValueStore",
    "ListState",
    "MapState",
    "Message",
    "SessionKey",
    "SessionStore",
    "SessionWindows",
    "StandaloneContext",
    "StandaloneJoin",
    "StoreSet",
    "ValueState",
    "WindowStore",
    "approx_distinct",
    "archive",
    "collect_list",
    "collect_set",
    "count",
    "first",
    "foreach_sink",
    "hopping",
    "in_memory_window_store",
    "join",
    "join_spec",
    "kafka",
    "kafka_sink",
    "key_value_store",
    "last",
    "list_state",
    "map_state",
    "max_",
    "mean",
    "median",
    "min_",
    "over_all",
    "parquet_sink",
    "policies",
    "quantile",
    "reducer",
    "session",
    "session_store",
    "sliding",
    "stddev",
    "stream",
    "sum_",
    "top_k",
    "tumbling",
    "value_state",
    "variance",
    "window_spec",
    "window_store",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home at its first use."""
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'backend' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value
