//! A whole runtimed in this process, against an API server in memory and a Runtime Server that does
//! what a test tells it to. Each file is one group of promises.

mod common;

mod cancel;
mod fence;
mod idle;
mod invoke;
mod register;
mod restart;
