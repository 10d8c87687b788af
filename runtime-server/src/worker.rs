//! A child process that runs one function.
//!
//! | Module | Question it answers |
//! | --- | --- |
//! | [`wire`] | what was said |
//! | [`frame`] | what do server and worker say to each other |
//! | [`lines`], [`exchange`] | and where the language cannot hold a NUL byte |
//! | [`exec`] | what must a worker give up before it runs the user's code |
//! | [`process`] | how is a worker started, talked to, ended |
//! | [`sweep`] | what did it leave behind |
//! | [`logs`], [`capture`] | what of its printed text is logged |
//! | [`desk`] | what is a waiting caller promised |
//! | [`starts`] | when has a function failed for good |
//! | [`supervise`] | when is a worker started again, and who gets which answer |

pub mod capture;
pub mod desk;
pub mod exchange;
pub mod exec;
pub mod frame;
pub mod lines;
pub mod logs;
pub mod process;
pub mod starts;
pub mod supervise;
pub mod sweep;
pub mod wire;
