"""The modules that import pyspark."""
