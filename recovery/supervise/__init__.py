"""Around Spark's query: restart, restore, tidy up, and what is measured."""
