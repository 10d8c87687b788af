//! What kruntimes keeps in Kubernetes: the Run and Runtime kinds, their rules, names and keys.
