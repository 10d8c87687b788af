//! Certificates that change while callers come and go (C-3.12).

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use crate::common::{World, eventually, pki};
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
                    let request = caller.request(&function.path).body("1".into()).unwrap();
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
