"""The public names: complete, importable, and light until one needs Spark."""

import subprocess
import sys

import backend


def test_every_public_name_is_there_once():
    assert len(set(backend.__all__)) == len(backend.__all__)
    assert sorted(backend.__all__) == sorted(backend._HOME_OF)
    for name in backend.__all__:
        assert getattr(backend, name) is not None


def test_a_public_name_is_never_a_module_whatever_was_imported_before():
    code = (
        "import pkgutil, backend, backend.operators.contexts, backend.policies;"
        "names = [n for n in backend.__all__ if n in {m.name for m in pkgutil.iter_modules(backend.__path__)}];"
        "print([(n, callable(getattr(backend, n))) for n in names])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[('policies', True)]"


def test_importing_backend_loads_neither_spark_nor_rocksdb():
    code = (
        "import sys, backend; from backend import tumbling, count;"
        "print('pyspark' in sys.modules, 'rocksdict' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "False"]
