"""The modules that import pyspark."""

from pyspark import __version__ as _pyspark

from backend.spark.session.versions import check_pyspark

check_pyspark(_pyspark)
