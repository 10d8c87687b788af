//! Certificates that change while callers come and go (C-3.12).

use std::{
    os::unix::fs::symlink,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use crate::common::{Caller, Pki, World, eventually, metric, pki};
use http::Version;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// The certificate that a new connection sees.
async fn shown(world: &World) -> Vec<u8> {
    world
        .caller()
        .connect()
        .await
        .get_ref()
        .1
        .peer_certificates()
        .unwrap()[0]
        .to_vec()
}

/// C-3.12; scenario 47.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_certificate_is_used_and_no_call_fails() {
    let world = Arc::new(World::start().await);
    let function = world.function("demo", "hello");
    let before = shown(&world).await;
    let (stop, calls) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let traffic = async {
        let caller = world.caller();
        while !stop.load(Ordering::Relaxed) {
            for version in [Version::HTTP_11, Version::HTTP_2] {
                // A caller of its own makes a new connection each time.
                let fresh = world.caller();
                for caller in [&caller, &fresh] {
                    let request = caller.post(&function.path, "1");
                    assert_eq!(caller.send(request, version).await.status, 200);
                    calls.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    };
    let rotation = async {
        let (cert, key) = world.pki.serving_pair("two");
        // Half a change first: the certificate without its key.
        std::fs::write(world.dirs.path().join("tls/tls.crt"), &cert).unwrap();
        eventually("some calls", || async {
            (calls.load(Ordering::Relaxed) > 20).then_some(())
        })
        .await;
        assert_eq!(shown(&world).await, before, "a bad pair keeps the old one");
        pki::write(&world.dirs.path().join("tls"), &cert, &key);
        eventually("the new certificate is shown", || async {
            (shown(&world).await != before).then_some(())
        })
        .await;
        stop.store(true, Ordering::Relaxed);
    };
    tokio::join!(traffic, rotation);
}

/// C-3: TLS 1.3, and 1.2 unless switched off.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_version_of_tls_can_be_switched_off() {
    let handshake = async |world: &World| {
        let mut config = world.pki.caller(&[b"http/1.1"]);
        let mut only12 =
            rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_protocol_versions(&[&rustls::version::TLS12])
                .unwrap()
                .with_root_certificates(world.pki.roots())
                .with_no_client_auth();
        only12.alpn_protocols = std::mem::take(&mut config.alpn_protocols);
        let tcp = TcpStream::connect(world.gateway.https).await.unwrap();
        TlsConnector::from(Arc::new(only12))
            .connect("localhost".try_into().unwrap(), tcp)
            .await
    };
    assert!(handshake(&World::start().await).await.is_ok());
    let strict = World::with(&["--tls-min-version", "1.3"], |_| {}).await;
    assert!(handshake(&strict).await.is_err());
    let function = strict.function("demo", "hello");
    assert_eq!(strict.caller().call(&function.path, "1").await.status, 200);
}

/// C-3.14
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_is_not_ready_without_a_certificate() {
    let world = World::start().await;
    let dirs = tempfile::tempdir().unwrap();
    world.pki.be_gateway(dirs.path());
    let gateway = crate::common::start(dirs.path(), &world.api, &[], |_| {}).await;
    assert!(
        gateway
            .readiness
            .state()
            .missing()
            .any(|part| part == "serving certificate")
    );
    world.pki.serve_as(dirs.path(), "one");
    gateway.readiness.ready().await;
}

/// As the kubelet publishes a volume: files are links through `..data`, which is replaced by renaming.
fn publish(dir: &Path, version: &str, (cert, key): &(String, String)) {
    pki::write(&dir.join(version), cert, key);
    let next = dir.join("..next");
    symlink(version, &next).unwrap();
    std::fs::rename(&next, dir.join("..data")).unwrap();
    for name in ["tls.crt", "tls.key"] {
        if !dir.join(name).exists() {
            symlink(format!("..data/{name}"), dir.join(name)).unwrap();
        }
    }
}

/// C-3.12; scenarios 47 and 49: the volume's link is swapped to a certificate of a new CA. Callers that have both CAs
/// in their bundle notice nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_swapped_volume_with_a_new_ca_is_used_and_an_overlap_verifies_all_the_time() {
    let world = World::start().await;
    let (old, new) = (&world.pki, Pki::new());
    let dirs = tempfile::tempdir().unwrap();
    old.be_gateway(dirs.path());
    let tls = dirs.path().join("tls");
    publish(&tls, "..1", &old.serving_pair("one"));
    let gateway = crate::common::start(dirs.path(), &world.api, &[], |_| {}).await;
    gateway.readiness.ready().await;
    let function = world.function("demo", "hello");
    let reaches = async |pkis: &[&Pki]| {
        let caller = Caller::trusting(gateway.https, pkis);
        let answer = caller
            .try_send(caller.post(&function.path, "1"), Version::HTTP_2)
            .await;
        answer.is_ok_and(|answer| answer.status == 200)
    };
    assert!(reaches(&[old]).await && !reaches(&[&new]).await);
    publish(&tls, "..2", &new.serving_pair("two"));
    eventually("the new certificate is shown", || async {
        assert!(reaches(&[old, &new]).await, "both verify all the time");
        reaches(&[&new]).await.then_some(())
    })
    .await;
    assert!(!reaches(&[old]).await && reaches(&[old, &new]).await);
    let until = metric(&gateway, "kruntimes_gateway_certificate_not_after_seconds").await;
    assert!(until > 0.0);
}

/// C-3.12, contract 4: the certificate and the CA of the hop change. No call fails, and once owners trust the new CA
/// only, no connection of the old certificate is in use.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_hop_changes_to_a_new_certificate_and_ca() {
    let world = World::start().await;
    let (old, new) = (&world.pki, Pki::new());
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let call = async || assert_eq!(caller.call(&function.path, "1").await.status, 200);
    call().await;
    let both = format!("{}{}", old.peer_ca(), new.peer_ca());
    world.owner.trust.replace(both.as_bytes()).unwrap();
    let peer = world.dirs.path().join("peer");
    let (cert, key) = new.gateway_pair();
    // Half a change first.
    std::fs::write(peer.join("tls.crt"), &cert).unwrap();
    call().await;
    std::fs::write(peer.join("tls.key"), &key).unwrap();
    eventually("a connection with the new certificate", || async {
        call().await;
        (world.owner.handshakes.accepted() == 2).then_some(())
    })
    .await;
    world.owner.trust.replace(new.peer_ca().as_bytes()).unwrap();
    call().await;
    assert_eq!(
        (world.owner.handshakes.accepted(), world.owner.handshakes.failed()),
        (2, 0)
    );
    // The old certificate again: nobody takes it, and nothing is sent.
    let (cert, key) = old.gateway_pair();
    pki::write(&peer, &cert, &key);
    eventually("the owner refuses", || async {
        (caller.call(&function.path, "1").await.status == 503).then_some(())
    })
    .await;
    caller
        .refused(
            || caller.post(&function.path, "1"),
            (503, "OwnerUnreachable", "gateway", "no"),
        )
        .await;
}
