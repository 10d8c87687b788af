//! Run to Pod, Runtime to pool of Pods; one active by Lease.
