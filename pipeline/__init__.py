"""The stages, in the order that data flows: ingest, reuse, cost, replay, study, warehouse; and the command line."""
