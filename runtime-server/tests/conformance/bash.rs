//! What is particular to functions in Bash (C-8.1, C-8.2).

mod ends;
mod output;
mod payload;
mod shell;

use kruntimes_proto::executor::InvokeFunctionResponse;

use crate::harness::{Function, Server};

async fn server() -> Server {
    with(&[], &[]).await
}

async fn with(flags: &[&str], env: &[(&str, &str)]) -> Server {
    Server::with(&[&["--adapter", "bash"], flags].concat(), env).await
}

/// A ready function from one file `main.sh`.
async fn function(server: &Server, code: &str) -> Function {
    let source = server.source(&[("main.sh", code)]);
    server.ready(&source).await
}

/// The whole answer to a call that ends well.
async fn answer(function: &Function, input: impl Into<Vec<u8>>) -> InvokeFunctionResponse {
    function
        .send(function.request(input))
        .await
        .expect("answer")
        .into_inner()
}

/// A JSON text of so many bytes.
fn json_of(bytes: usize) -> String {
    format!("\"{}\"", "x".repeat(bytes - 2))
}
