"""Operators: one micro-batch in, changes and emissions out. No Spark, no Kafka, no disk."""
