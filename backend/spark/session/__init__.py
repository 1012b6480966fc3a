"""A Spark session: its version, its JVM, its settings, the jars that Kafka needs."""
