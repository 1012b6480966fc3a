"""One Kafka client for source, sink and changelog: where the cluster is, what it says, how it is read and written.

Not `backend.kafka`: that is the public function. `settings`, `identity` and `loss` need no confluent-kafka, which may
not be installed; the other modules import it.
"""
