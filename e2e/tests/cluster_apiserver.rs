//! The API server of a real cluster gets a certificate of another CA. A target of its own, because all clients of the
//! cluster are concerned, and it lasts as long as a client may take to read the CAs again.

use std::{path::Path, time::Duration};

use anyhow::{Result, ensure};
use kruntimes_e2e::{
    cluster::{Cluster, eventually},
    install,
    load::Callers,
    suite::operations,
};
use tokio::process::Command;

/// The CAs that a client of the daemons goes by may be so old.
const READ_AGAIN: Duration = Duration::from_secs(61);

/// C-3.14, C-7.3: with an overlap, as operators do it, nothing of it is noticed: no call fails, and functions are made and
/// ended as before.
#[tokio::test]
async fn the_api_server_gets_a_certificate_of_another_ca_under_load() -> Result<()> {
    let world = install::world(&Cluster::node().await?, 1, 16).await?;
    let functions = operations::echoes(&world, 8).await?;
    let callers = Callers::start(&world, &functions, Duration::from_millis(80), true);

    rotate("publish-both").await?;
    tokio::time::sleep(READ_AGAIN).await;
    rotate("serve").await?;
    // This test's own connection has ended too, and its client learns that from its next request.
    eventually("the new API server answers", || async {
        Ok(Some(world.client.apiserver_version().await?))
    })
    .await?;
    for name in ["during", "after"] {
        let function = operations::echo(&world, name).await?;
        world.delete(&function.name).await?;
        world.gone(&function.name).await?;
        if name == "during" {
            rotate("publish-new").await?;
        }
    }

    let tally = callers.stop().await?;
    ensure!(
        tally.failures.is_empty(),
        "of {} calls: {:?}",
        tally.calls,
        tally.failures
    );
    ensure!(tally.calls > 5000, "only {} calls were made", tally.calls);
    world.close().await
}

async fn rotate(step: &str) -> Result<()> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dev/rotate-ca");
    let done = Command::new(script).arg(step).status().await?;
    ensure!(done.success(), "dev/rotate-ca {step}: {done}");
    Ok(())
}
