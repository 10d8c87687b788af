//! What a daemon owes its operator: flags, logs, metrics, health, drain and watched certificates.
