//! What must agree inside this repository: documents, charts, tests and the rules of its files.

mod charts;
mod committed_promises;
mod documents;
mod tidy;
