//! End-to-end tests on a real API server and on a real cluster.
