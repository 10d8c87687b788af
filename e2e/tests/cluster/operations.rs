//! Operating an installation on a real cluster: certificates renewed by cert-manager,
//! gateways replaced, rights withdrawn, memory running out.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod};
use kruntimes_e2e::{
    call::{self, Call, Version},
    cluster::{Cluster, eventually},
    install,
    load::{Callers, Line},
    suite::operations,
    world::World,
};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams},
};
use serde_json::json;

const ECHO: &str = "def handler(event, context):\n    return event\n";

/// C-3.6.
#[tokio::test]
async fn a_withdrawn_right_stops_working_within_20_s() -> Result<()> {
    let world = install::world(&Cluster::node().await?, 1, 8).await?;
    operations::revocation(&world).await?;
    operations::never_before_it_is_loaded(&world).await?;
    world.close().await
}

/// C-5.6.
#[tokio::test]
async fn a_function_that_eats_all_memory_harms_nobody_for_long() -> Result<()> {
    let world = install::world(&Cluster::node().await?, 1, 8).await?;
    operations::out_of_memory(&world).await?;
    world.close().await
}

/// C-3.12, C-3.13: cert-manager renews the serving certificate, then every gateway is
/// replaced, under 100 calls a second. Nobody notices: no call fails, and calls of 20 s that a
/// leaving gateway holds end with 200.
#[tokio::test]
async fn certificates_and_gateways_are_replaced_under_load() -> Result<()> {
    let world = install::world(&Cluster::node().await?, 1, 16).await?;
    let functions = operations::echoes(&world, 8).await?;
    let every = Duration::from_millis(80);
    let callers = Callers::start(&world, &functions, every, true);

    let before = world.gateway.certificate().await?;
    renew(&world).await?;
    eventually("new connections show the renewed certificate", || async {
        Ok((world.gateway.certificate().await? != before).then_some(()))
    })
    .await?;

    let slow = "import time\n\ndef handler(event, context):\n    time.sleep(event or 0)\n    return event\n";
    let mut running = Vec::new();
    for version in [Version::Http1, Version::Http2] {
        let name = format!("slow-{version:?}").to_lowercase();
        let function = world.function(&name, slow).await?;
        world.invoke_until(&function, "0", 200).await?;
        running.push(operations::hold(&world, &function, "20", version).await?);
    }
    replace_gateways(&world).await?;
    for call in running {
        let answer = call.await?.context("a call of 20 s was cut")?;
        ensure!(
            answer.status == 200 && answer.json() == 20,
            "{} {:?}",
            answer.status,
            answer.body
        );
    }
    let tally = callers.stop().await?;
    ensure!(
        tally.failures.is_empty(),
        "of {} calls: {:?}",
        tally.calls,
        tally.failures
    );
    ensure!(tally.calls > 500, "only {} calls were made", tally.calls);
    world.close().await
}

/// C-3.5: a caller who has seen that a function is Ready is answered by it at once, whichever gateway is asked.
#[tokio::test]
async fn every_gateway_calls_what_is_ready() -> Result<()> {
    let world = install::world(&Cluster::node().await?, 1, 8).await?;
    let gateways = gateways(&world).await?;
    ensure!(gateways.len() > 1, "one gateway is no choice: {gateways:?}");
    for index in 0..8 {
        let name = format!("fresh-{index}");
        let function = world.create(&name, world.spec(ECHO)).await?;
        world.ready(&function).await?;
        let call = Call::invoke(&function.path, &world.token, index.to_string());
        for address in &gateways {
            let mut gateway = world.gateway.clone();
            gateway.address = *address;
            let answer = gateway.send(&call).await?;
            ensure!(
                answer.status == 200 && answer.json() == index,
                "{name} at {address}: {} {:?}",
                answer.status,
                answer.body
            );
        }
    }
    world.close().await
}

/// C-5.3, bug scenario 42: whichever gateway is asked, over however many connections, a function runs one call at a time;
/// all others are told so.
#[tokio::test]
async fn gateways_together_run_one_call_of_a_function_at_a_time() -> Result<()> {
    // Where two calls overlap, the second finds the first one's mark.
    const MARKED: &str = "import os, time\n\n\
        def handler(event, context):\n\
        \x20   mark = os.open('mark', os.O_CREAT | os.O_EXCL)\n\
        \x20   time.sleep(0.005)\n\
        \x20   os.close(mark)\n\
        \x20   os.unlink('mark')\n\
        \x20   return event\n";
    let world = install::world(&Cluster::node().await?, 1, 8).await?;
    let gateways = gateways(&world).await?;
    ensure!(gateways.len() > 1, "one gateway is no choice: {gateways:?}");
    let function = world.function("marked", MARKED).await?;
    world.invoke_until(&function, "0", 200).await?;
    let callers: Vec<_> = (0..20)
        .map(|index| {
            let mut gateway = world.gateway.clone();
            gateway.address = gateways[index % gateways.len()];
            let call = Call::invoke(&function.path, &world.token, "1");
            call::spawn(async move {
                let mut line = Line::new(&gateway);
                let mut answers = Vec::new();
                for _ in 0..10 {
                    answers.push(line.send(&call).await?);
                }
                Ok::<_, anyhow::Error>(answers)
            })
        })
        .collect();
    let mut ran = 0;
    for caller in callers {
        for answer in caller.await?? {
            let status = answer.status.as_u16();
            ensure!([200, 429].contains(&status), "{status} {:?}", answer.body);
            ran += usize::from(status == 200);
        }
    }
    ensure!((1..200).contains(&ran), "{ran} of 200 calls ran");
    world.close().await
}

/// C-3.12, bug scenario 50: a client that follows RFC 5280 to the letter, as Python does since 3.13, accepts the
/// gateway's certificate by the CA that a Run publishes.
#[tokio::test]
async fn a_strict_client_trusts_the_published_ca() -> Result<()> {
    const STRICT: &str = "import socket, ssl, sys\n\
        address, name, bundle = sys.argv[1:]\n\
        context = ssl.create_default_context(cafile=bundle)\n\
        context.verify_flags |= ssl.VERIFY_X509_STRICT\n\
        with socket.create_connection((address, 443), 10) as plain:\n\
        \x20   with context.wrap_socket(plain, server_hostname=name) as secured:\n\
        \x20       print(secured.version())\n";
    let world = install::world(&Cluster::node().await?, 1, 8).await?;
    let function = world.function("strict", ECHO).await?;
    let run = world.ready(&function).await?;
    let published = run.status.and_then(|it| it.endpoint?.ca_bundle);
    let folder = tempfile::tempdir()?;
    let bundle = folder.path().join("ca.crt");
    std::fs::write(&bundle, published.context("the Run publishes a CA")?.0)?;
    let asked = tokio::process::Command::new("python3")
        .args([
            "-c",
            STRICT,
            &world.gateway.address.ip().to_string(),
            &world.gateway.name,
        ])
        .arg(&bundle)
        .output()
        .await?;
    let said = String::from_utf8_lossy(&asked.stdout);
    ensure!(
        said.trim() == "TLSv1.3",
        "{said} {}",
        String::from_utf8_lossy(&asked.stderr)
    );
    world.close().await
}

/// Where each gateway listens, without the Service before it.
async fn gateways(world: &World) -> Result<Vec<SocketAddr>> {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), &install::system_namespace());
    let ours = ListParams::default().labels("app.kubernetes.io/name=kruntimes-gateway");
    let mut found = Vec::new();
    for pod in pods.list(&ours).await? {
        let leaving = pod.metadata.deletion_timestamp.is_some();
        if let Some(address) = pod.status.and_then(|it| it.pod_ip).filter(|_| !leaving) {
            found.push(SocketAddr::new(address.parse()?, 8443));
        }
    }
    Ok(found)
}

/// What `cmctl renew` does: cert-manager sees that it should issue again.
async fn renew(world: &World) -> Result<()> {
    let kind = GroupVersionKind::gvk("cert-manager.io", "v1", "Certificate");
    let certificates: Api<DynamicObject> = Api::namespaced_with(
        world.client.clone(),
        &install::system_namespace(),
        &ApiResource::from_gvk(&kind),
    );
    let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let current = certificates.get("kruntimes-gateway").await?;
    let mut conditions = current.data["status"]["conditions"].clone();
    conditions
        .as_array_mut()
        .context("the Certificate has conditions")?
        .push(json!({
            "type": "Issuing", "status": "True", "reason": "ManuallyTriggered",
            "message": "renewed by a test", "lastTransitionTime": now,
        }));
    let status = json!({ "status": { "conditions": conditions } });
    certificates
        .patch_status(
            "kruntimes-gateway",
            &PatchParams::default(),
            &Patch::Merge(status),
        )
        .await?;
    Ok(())
}

/// What `kubectl rollout restart` does, and waits until it is over.
async fn replace_gateways(world: &World) -> Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(world.client.clone(), &install::system_namespace());
    let restart = json!({ "spec": { "template": { "metadata": { "annotations": {
        "kubectl.kubernetes.io/restartedAt": jiff::Timestamp::now().to_string(),
    }}}}});
    deployments
        .patch(
            "kruntimes-gateway",
            &PatchParams::default(),
            &Patch::Strategic(restart),
        )
        .await?;
    eventually("all gateways are new", || async {
        let deployment = deployments.get("kruntimes-gateway").await?;
        Ok(operations::is_rolled_out(&deployment).then_some(()))
    })
    .await
}
