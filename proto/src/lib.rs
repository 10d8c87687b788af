//! What kruntimes processes say to each other: the executor.v1 services, their limits, ids and failures.
