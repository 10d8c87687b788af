//! The daemon that owns the Runs of one Pod.
