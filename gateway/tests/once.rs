//! Nothing is sent twice, whatever the owner's connection does (C-3.7; bug scenario 20).

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::common::{
    Owner, Pki, World,
    frames::{DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, RST_STREAM, SETTINGS, frame},
    path,
};
use http::Version;
use kruntimes_api::fixtures;
use kruntimes_peer::{OwnKey, accept::server_config};
use kruntimes_proto::failure::{Dispatched, Failure, Reason};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::AbortHandle,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

/// What a broken owner does once a whole call has arrived.
#[derive(Debug, Clone, Copy)]
enum Breaks {
    BadFrame,
    BadHeaders,
    Reset,
    RefusedStream,
    GoAway,
    Close,
}

/// An owner that counts whole calls and then breaks.
struct Broken {
    address: String,
    key: String,
    calls: Arc<AtomicUsize>,
    server: AbortHandle,
}

impl Broken {
    async fn start(pki: &Pki, breaks: Breaks) -> Self {
        let own = OwnKey::generate().unwrap();
        let acceptor = TlsAcceptor::from(server_config(&own, pki.peer_trust()).unwrap());
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap().to_string();
        let calls = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&calls);
        #[expect(clippy::disallowed_methods, reason = "ends with the test")]
        let server = tokio::spawn(async move {
            loop {
                let (tcp, _) = socket.accept().await.unwrap();
                let Ok(mut tls) = acceptor.accept(tcp).await else {
                    continue;
                };
                // One connection after the other is enough: the gateway keeps one.
                let _ = one_call(&mut tls, &count, breaks).await;
            }
        });
        Self {
            address,
            key: own.peer_key().to_string(),
            calls,
            server: server.abort_handle(),
        }
    }
}

impl Drop for Broken {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn one_call(
    tls: &mut TlsStream<TcpStream>,
    calls: &AtomicUsize,
    breaks: Breaks,
) -> std::io::Result<()> {
    tls.write_all(&frame(SETTINGS, 0, 0, &[])).await?;
    tls.flush().await?;
    let mut preface = [0; 24];
    tls.read_exact(&mut preface).await?;
    loop {
        let mut head = [0; 9];
        tls.read_exact(&mut head).await?;
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        tls.read_exact(&mut payload).await?;
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        match (head[3], head[4] & END_STREAM) {
            (SETTINGS, 0) => tls.write_all(&frame(SETTINGS, 1, 0, &[])).await?,
            (DATA, END_STREAM) => {
                calls.fetch_add(1, Ordering::SeqCst);
                let bytes = match breaks {
                    Breaks::BadFrame => frame(DATA, 0, 0, b"no stream"),
                    // A header block that no decoder takes.
                    Breaks::BadHeaders => frame(HEADERS, END_HEADERS, stream, &[0xff; 16]),
                    Breaks::Reset => frame(RST_STREAM, 0, stream, &2_u32.to_be_bytes()),
                    Breaks::RefusedStream => frame(RST_STREAM, 0, stream, &7_u32.to_be_bytes()),
                    // Says of the call that it was taken on; then closes.
                    Breaks::GoAway => frame(
                        GOAWAY,
                        0,
                        0,
                        &[stream.to_be_bytes(), 0_u32.to_be_bytes()].concat(),
                    ),
                    Breaks::Close => Vec::new(),
                };
                tls.write_all(&bytes).await?;
                tls.flush().await?;
                if matches!(breaks, Breaks::GoAway | Breaks::Close) {
                    return tls.shutdown().await;
                }
            }
            _ => {}
        }
        tls.flush().await?;
    }
}

/// C-3.7; scenario 20.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_arrives_once_however_the_connection_breaks() {
    let world = World::start().await;
    let caller = world.caller();
    let all = [
        Breaks::BadFrame,
        Breaks::BadHeaders,
        Breaks::Reset,
        Breaks::RefusedStream,
        Breaks::GoAway,
        Breaks::Close,
    ];
    for breaks in all {
        let broken = Broken::start(&world.pki, breaks).await;
        let name = format!("{breaks:?}").to_lowercase();
        let run = fixtures::run("demo", &name)
            .ready_on("pod-a")
            .owner(&broken.address, &broken.key)
            .build();
        let function = world.put(&run);
        for (calls, version) in [(1, Version::HTTP_11), (2, Version::HTTP_2)] {
            let request = caller.post(&function.path, "1");
            let answer = caller.send(request, version).await;
            assert_eq!(
                (answer.status, answer.reason().as_str()),
                (502, "OutcomeUnknown"),
                "{breaks:?}"
            );
            assert_eq!(answer.dispatched(), "unknown", "{breaks:?}");
            assert_eq!(broken.calls.load(Ordering::SeqCst), calls, "{breaks:?}");
        }
    }
}

/// C-3.7: the owner's explicit "not mine" allows one second try, if the route has moved meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_route_is_tried_again_once_when_it_moved() {
    let world = World::start().await;
    let caller = Arc::new(world.caller());
    let old = Owner::start(&world.pki).await;
    let function = world.function_of(&old, "demo", "hello");
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    let moved = fixtures::run("demo", "hello")
        .attempt(2)
        .ready_on("pod-b")
        .owner(&world.owner.address(), &world.owner.key())
        .build();
    let later = fixtures::run("demo", "later").build();
    let (api, probe) = (world.api.clone(), Arc::clone(&caller));
    old.answers(move |_| {
        let (api, probe) = (api.clone(), Arc::clone(&probe));
        let (moved, later) = (moved.clone(), later.clone());
        async move {
            api.put(&moved);
            api.put(&later);
            // What came later is known: so is the move.
            let path = path("demo", "python", later.metadata.uid.as_deref().unwrap());
            assert_eq!(probe.call(&path, "1").await.reason(), "Pending");
            Err(Failure::new(Reason::StaleRoute, "not mine").to_status())
        }
    });
    let answer = caller.call(&function.path, "2").await;
    assert_eq!((answer.status, answer.text()), (200, "2"));
    assert_eq!((old.calls().len(), world.owner.calls().len()), (2, 1));
    let stale = Failure::new(Reason::StaleRoute, "not mine");
    world
        .owner
        .answers(move |_| std::future::ready(Err(stale.to_status())));
    caller
        .refused(
            || caller.post(&function.path, "3"),
            (503, "StaleRoute", "runtimed", "no"),
        )
        .await;
    assert_eq!(world.owner.calls().len(), 3, "the route has not moved");
}

/// C-3.7
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_started_call_is_never_tried_again() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let failure = Failure::new(Reason::StaleRoute, "half-way").dispatched(Dispatched::Unknown);
    world
        .owner
        .answers(move |_| std::future::ready(Err(failure.to_status())));
    assert_eq!(caller.call(&function.path, "1").await.dispatched(), "unknown");
    assert_eq!(world.owner.calls().len(), 1);
}
