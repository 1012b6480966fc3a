"""The public names: complete, importable, and light until one needs Spark."""

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import backend


def test_every_public_name_is_there_once():
    stub = [
        (name.name, name.asname)
        for line in ast.parse(Path(backend.__file__).with_suffix(".pyi").read_text()).body
        if isinstance(line, ast.ImportFrom)
        for name in line.names
    ]
    assert all(name == public for name, public in stub), "`import x as x` is how a stub makes a name public"
    assert sorted(backend.__all__) == sorted(name for name, _ in stub)
    for name, _ in stub:
        assert getattr(backend, name) is not None


def test_every_error_and_what_start_returns_are_public():
    from backend import errors

    named = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and kind.__module__ == errors.__name__
    }
    assert named <= set(backend.__all__)
    assert {"RewindQuery", "RocksStore", "LoggingListener", "RestoreListener"} <= set(backend.__all__)


def test_the_packages_say_that_they_are_typed():
    import recovery

    for package in (backend, recovery):
        assert Path(package.__path__[0], "py.typed").exists()


def test_no_public_name_is_a_modules_too():
    """It would be found instead of the name once something had imported it."""
    assert not {module.name for module in pkgutil.iter_modules(backend.__path__)} & set(backend.__all__)


def test_importing_backend_loads_neither_spark_nor_rocksdb():
    code = (
        "import sys, backend; from backend import tumbling, count;"
        "print('pyspark' in sys.modules, 'rocksdict' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "False"]


def test_every_public_name_is_there_without_the_extras():
    """Each extra's own package cannot be imported; what needs it says so when it is called."""
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('confluent_kafka', 'deltalake', 'pyiceberg', 'sqlalchemy', 'fastavro'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from backend import *\n"
        "print(kafka_sink.__name__, delta_sink.__name__, kafka.__name__)\n"
        "try:\n"
        "    kafka_sink('results', 'errors', servers='localhost:9092')\n"
        "except ModuleNotFoundError as error:\n"
        "    print('needs', error)\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == ["kafka_sink delta_sink kafka", "needs confluent_kafka"]
