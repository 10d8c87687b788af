//! HTTP/2 as its specification has it: the public suite `h2spec`, against the gateway.

use anyhow::{Context as _, Result, ensure};
use kruntimes_e2e::{
    cluster::Cluster,
    stack::{Choices, Stack},
};
use tokio::process::Command;

/// What RFC 9113 and RFC 7541 forbid ends the stream or the connection with the code that they name, and what they allow is
/// answered.
#[tokio::test]
async fn the_gateway_speaks_http2_as_specified() -> Result<()> {
    let stack = Stack::start(&Cluster::api().await?, Choices::default()).await?;
    let address = stack.world.gateway.address;
    let output = Command::new("h2spec")
        .args([
            "--host",
            &address.ip().to_string(),
            "--port",
            &address.port().to_string(),
        ])
        // The name in the certificate is another one, and not what is tested here.
        .args(["--tls", "--insecure", "--strict", "--timeout", "10"])
        .output()
        .await
        .context("h2spec; dev/test builds it")?;
    let told = String::from_utf8_lossy(&output.stdout);
    let verdict = told.lines().rev().find(|line| line.contains(" tests, "));
    ensure!(
        output.status.success() && verdict.is_some_and(|line| line.contains(" 0 skipped, 0 failed")),
        "{told}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
