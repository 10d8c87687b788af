//! Who can talk to whom over the hop (contract 4; bug scenarios 15 and 64).

mod common;

use std::sync::{Arc, Mutex, atomic::Ordering};

use common::{Ca, Owner, Says, call, dialer, rotating};
use kruntimes_peer::{AddressRule, DialError, Dialer, OwnKey, RotatingIdentity, TrustBundle, never_sent};
use rcgen::ExtendedKeyUsagePurpose;
use rustls::sign::CertifiedKey;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// Contract 4
#[tokio::test]
async fn a_gateway_calls_the_owner_it_means() {
    let ca = Ca::new();
    let owner = Owner::start(&ca).await;
    let mut channel = dialer(ca.issue(&Says::default()))
        .dial(owner.address, &owner.key.peer_key())
        .await
        .expect("connected");
    assert_eq!(call(&mut channel).await.expect("answered"), "127.0.0.1");
    assert_eq!(call(&mut channel).await.expect("again"), "127.0.0.1");
    assert_eq!(owner.counts.accepted(), 1, "one connection for both");
}

/// Bug scenario 15: the address was given to another Pod, with another key.
#[tokio::test]
async fn another_key_at_the_same_address_gets_nothing() {
    let ca = Ca::new();
    let owner = Owner::start(&ca).await;
    let before = OwnKey::generate().expect("a key").peer_key();
    let error = dialer(ca.issue(&Says::default()))
        .dial(owner.address, &before)
        .await
        .expect_err("another key");
    assert!(matches!(error, DialError::Handshake(_)), "{error}");
    assert_eq!(owner.calls.load(Ordering::SeqCst), 0);
}

/// Contract 4
#[tokio::test]
async fn an_owner_refuses_everybody_but_gateways_of_its_installation() {
    let ca = Ca::new();
    let owner = Owner::start(&ca).await;
    let says = Says::default();
    let strangers = [
        ("another CA", Ca::new().issue(&says)),
        (
            "no URI",
            ca.issue(&Says {
                uris: vec![],
                ..says.clone()
            }),
        ),
        (
            "another URI",
            ca.issue(&Says {
                uris: vec!["spiffe://kruntimes.io/gateway/"],
                ..says.clone()
            }),
        ),
        (
            "another URI too",
            ca.issue(&Says {
                uris: vec!["spiffe://kruntimes.io/gateway", "spiffe://other/x"],
                ..says.clone()
            }),
        ),
        (
            "a server's certificate",
            ca.issue(&Says {
                usage: ExtendedKeyUsagePurpose::ServerAuth,
                ..says.clone()
            }),
        ),
        (
            "over",
            ca.issue(&Says {
                years: (2020, 2021),
                ..says.clone()
            }),
        ),
        (
            "not yet",
            ca.issue(&Says {
                years: (2090, 2100),
                ..says.clone()
            }),
        ),
        ("self-signed", OwnKey::generate().expect("a key").certified()),
    ];
    let pin = owner.key.peer_key();
    for (who, identity) in strangers {
        let error = dialer(identity).dial(owner.address, &pin).await.expect_err(who);
        assert!(matches!(error, DialError::Refused(_)), "{who}: {error}");
    }
    assert_eq!(owner.calls.load(Ordering::SeqCst), 0);
    assert_eq!(owner.counts.accepted(), 0);
    // And the owner still serves.
    let mut channel = dialer(ca.issue(&says))
        .dial(owner.address, &pin)
        .await
        .expect("a gateway");
    call(&mut channel).await.expect("answered");
}

/// Contract 4
#[tokio::test]
async fn without_a_certificate_nobody_dials_and_nobody_is_let_in() {
    let ca = Ca::new();
    let owner = Owner::start(&ca).await;
    let pin = owner.key.peer_key();
    let error = rotating(RotatingIdentity::new(|| None))
        .dial(owner.address, &pin)
        .await
        .expect_err("no certificate");
    assert!(matches!(error, DialError::NoIdentity), "{error}");
    // It is there when asked and gone in the handshake: the owner sees an anonymous client.
    let asked = Mutex::new(Some(ca.issue(&Says::default())));
    let once = RotatingIdentity::new(move || asked.lock().expect("lock").take());
    let error = rotating(once)
        .dial(owner.address, &pin)
        .await
        .expect_err("anonymous");
    assert!(matches!(error, DialError::Refused(_)), "{error}");
}

/// Contract 4
#[tokio::test]
async fn while_no_ca_is_known_nobody_is_let_in() {
    let ca = Ca::new();
    let owner = Owner::with(OwnKey::generate().expect("a key"), TrustBundle::new()).await;
    let pin = owner.key.peer_key();
    let dialer = dialer(ca.issue(&Says::default()));
    let error = dialer.dial(owner.address, &pin).await.expect_err("no CA");
    assert!(matches!(error, DialError::Refused(_)), "{error}");
    assert!(owner.trust.replace(b"").is_err());
    assert!(owner.trust.replace(b"no certificate").is_err());
    assert!(owner.trust.is_empty());
    assert_eq!(owner.trust.replace(ca.pem.as_bytes()).expect("a CA"), 1);
    dialer.dial(owner.address, &pin).await.expect("trusted now");
}

/// C-3.12, contract 4; scenario 49.
#[tokio::test]
async fn a_rotation_of_the_ca_accepts_old_and_new_and_then_only_new() {
    let (old, new) = (Ca::new(), Ca::new());
    let owner = Owner::start(&old).await;
    let pin = owner.key.peer_key();
    let current: Arc<Mutex<Arc<CertifiedKey>>> = Arc::new(Mutex::new(old.issue(&Says::default())));
    let source = Arc::clone(&current);
    let gateway = rotating(RotatingIdentity::new(move || {
        Some(Arc::clone(&source.lock().expect("lock")))
    }));
    let mut running = gateway.dial(owner.address, &pin).await.expect("old");
    let both = format!("{}{}", old.pem, new.pem);
    assert_eq!(owner.trust.replace(both.as_bytes()).expect("both"), 2);
    gateway.dial(owner.address, &pin).await.expect("old still");
    *current.lock().expect("lock") = new.issue(&Says::default());
    gateway.dial(owner.address, &pin).await.expect("new");
    // A broken bundle changes nothing.
    assert!(
        owner
            .trust
            .replace(&both.as_bytes()[..both.len() / 2 + 30])
            .is_err()
    );
    owner.trust.replace(new.pem.as_bytes()).expect("new only");
    gateway.dial(owner.address, &pin).await.expect("new");
    let late = dialer(old.issue(&Says::default()));
    let error = late.dial(owner.address, &pin).await.expect_err("old");
    assert!(matches!(error, DialError::Refused(_)), "{error}");
    call(&mut running).await.expect("existing connections stay");
}

/// C-3.7: a channel never dials again by itself, and says that nothing was sent.
#[tokio::test]
async fn a_lost_connection_is_an_error_of_which_nothing_was_sent() {
    let ca = Ca::new();
    let mut owner = Owner::start(&ca).await;
    let mut channel = dialer(ca.issue(&Says::default()))
        .dial(owner.address, &owner.key.peer_key())
        .await
        .expect("connected");
    call(&mut channel).await.expect("answered");
    owner.kill();
    // The sockets close a little later, and a call may meet a connection that is just dying, which
    // is "unknown". From then on it is known.
    let last = tokio::time::timeout(std::time::Duration::from_secs(30), async {
        loop {
            match call(&mut channel).await {
                Err(status) if never_sent(&status) => break status,
                _ => tokio::task::yield_now().await,
            }
        }
    });
    let last = last.await.expect("the connection ends");
    assert_eq!(last.code(), tonic::Code::Unavailable, "{last:?}");
    assert!(!never_sent(&tonic::Status::unavailable("invented")));
}

/// Contract 4
#[tokio::test]
async fn nothing_listens_and_a_silent_listener_are_told_apart() {
    let ca = Ca::new();
    let pin = OwnKey::generate().expect("a key").peer_key();
    let identity = ca.issue(&Says::default());
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let silent = Dialer::new(
        Arc::new(RotatingIdentity::fixed(Arc::clone(&identity))),
        AddressRule::AllowLocal,
        std::time::Duration::from_millis(50),
    );
    let error = silent.dial(address, &pin).await.expect_err("silence");
    assert!(matches!(error, DialError::Timeout(_)), "{error}");
    drop(listener);
    let error = dialer(Arc::clone(&identity))
        .dial(address, &pin)
        .await
        .expect_err("nothing listens");
    assert!(matches!(error, DialError::Connect(_)), "{error}");
    let pods_only = Dialer::new(
        Arc::new(RotatingIdentity::fixed(identity)),
        AddressRule::PodsOnly,
        std::time::Duration::from_secs(1),
    );
    let error = pods_only.dial(address, &pin).await.expect_err("loopback");
    assert!(matches!(error, DialError::Address(_)), "{error}");
}

/// Bug scenario 64.
#[tokio::test]
async fn half_handshakes_and_plain_http_harm_nobody() {
    let ca = Ca::new();
    let owner = Owner::start(&ca).await;
    // Each says the beginning of a handshake and then nothing.
    let mut half = Vec::new();
    for _ in 0..300 {
        let mut stream = TcpStream::connect(owner.address).await.expect("connect");
        stream.write_all(b"\x16\x03\x01\x02\x00").await.expect("write");
        half.push(stream);
    }
    for nonsense in [
        &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0\0\0\0",
        b"",
    ] {
        let mut stream = TcpStream::connect(owner.address).await.expect("connect");
        stream.write_all(nonsense).await.expect("write");
        stream.shutdown().await.expect("close");
        // The owner closes; whether it says anything before does not matter.
        let _ = stream.read_to_end(&mut Vec::new()).await;
    }
    let mut channel = dialer(ca.issue(&Says::default()))
        .dial(owner.address, &owner.key.peer_key())
        .await
        .expect("a gateway gets through");
    call(&mut channel).await.expect("answered");
    assert_eq!(owner.counts.accepted(), 1);
    assert!(owner.counts.failed() >= 4, "{:?}", owner.counts);
    assert!(owner.counts.displaced() >= 44, "{:?}", owner.counts);
    drop(half);
}
