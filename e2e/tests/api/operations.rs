//! Operating an installation, as processes on loopback: rights withdrawn, certificates
//! renewed, writes beneath a running call.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use kruntimes_e2e::{
    cluster::{Cluster, eventually},
    load::Callers,
    stack::{Choices, Stack},
    suite::operations,
};

/// C-3.6: nobody calls for long without the right to.
#[tokio::test]
async fn a_withdrawn_right_stops_working_within_20_s() -> Result<()> {
    let stack = Stack::start(&Cluster::api().await?, Choices::default()).await?;
    operations::revocation(&stack.world).await
}

/// C-2.2, C-5.3.
#[tokio::test]
async fn readiness_and_slots_are_right_whatever_is_written_meanwhile() -> Result<()> {
    let stack = Stack::start(&Cluster::api().await?, Choices::default()).await?;
    operations::never_before_it_is_loaded(&stack.world).await?;
    operations::a_slot_survives_writes(&stack.world).await
}

/// C-3.12, bug scenario 47: the certificate is swapped under 100 calls a second, half of
/// them on connections of their own. Within 10 s new connections show the new one; no
/// call fails; a pair that does not match changes nothing.
#[tokio::test]
async fn a_certificate_is_swapped_under_load() -> Result<()> {
    let stack = Stack::start(&Cluster::api().await?, Choices::default()).await?;
    let world = &stack.world;
    let functions = operations::echoes(world, 8).await?;
    let (fresh, kept) = functions.split_at(4);
    let every = Duration::from_millis(80);
    let callers = [
        Callers::start(world, fresh, every, true),
        Callers::start(world, kept, every, false),
    ];
    let before = stack.world.gateway.certificate().await?;

    // Half a pair: the certificate is new, the key is not.
    let half = stack.renewed_certificate()?;
    put(&stack.tls_folder().join("tls.crt"), half.certificate.as_bytes())?;
    eventually("the gateway tells of the broken pair", || async {
        let told = stack.gateway.output().contains("certificate pair refused");
        Ok(told.then_some(()))
    })
    .await?;
    ensure!(
        stack.world.gateway.certificate().await? == before,
        "a broken pair was taken"
    );

    put(&stack.tls_folder().join("tls.key"), half.key.as_bytes())?;
    let swapped = tokio::time::timeout(Duration::from_secs(10), async {
        while stack.world.gateway.certificate().await? == before {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        anyhow::Ok(())
    });
    swapped
        .await
        .context("new connections still show the old certificate after 10 s")??;
    for callers in callers {
        let tally = callers.stop().await?;
        ensure!(
            tally.failures.is_empty(),
            "of {} calls: {:?}",
            tally.calls,
            tally.failures
        );
        ensure!(tally.calls > 50, "only {} calls were made", tally.calls);
    }
    Ok(())
}

fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    let next = path.with_extension("next");
    fs::write(&next, bytes)?;
    Ok(fs::rename(next, path)?)
}
