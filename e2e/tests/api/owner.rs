//! The owner of functions as a process, with a real Runtime Server and a real API server.

use anyhow::Result;
use kruntimes_e2e::{
    cluster::Cluster,
    stack::{Choices, Stack},
    suite::owner,
};

/// C-5.4, C-3.1.
#[tokio::test]
async fn what_a_call_leaves_in_its_file_comes_back_with_it() -> Result<()> {
    let stack = Stack::start(&Cluster::api().await?, Choices::default()).await?;
    owner::outputs(&stack.world).await
}

/// C-6.2, C-2.4, scenario 101.
#[tokio::test]
async fn functions_end_when_their_time_is_over() -> Result<()> {
    let stack = Stack::start(&Cluster::api().await?, Choices::default()).await?;
    owner::time_is_over(&stack.world).await
}
