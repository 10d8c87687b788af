//! How a gateway ends (C-3.13).

use std::time::Duration;

use crate::common::{
    ALICE, Caller, World,
    caller::{head, read_all, read_until},
    eventually,
    frames::{Frames, GOAWAY},
    start,
};
use http::Version;
use kruntimes_gateway::app::Running;
use kruntimes_ops::readiness::Readiness;
use tokio::{io::AsyncWriteExt as _, net::TcpStream};

/// C-3.13; scenario 43.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_calls_finish_and_then_it_ends_at_once() {
    let world = World::start().await;
    let gateway = start(world.dirs.path(), &world.api, &[], |_| {}).await;
    gateway.readiness.ready().await;
    let function = world.function("demo", "hello");
    let (readiness, address) = (gateway.readiness.clone(), gateway.https);
    let gate = world.owner.gate();
    let caller = Caller::new(address, &world.pki);
    let call = |version| caller.send(caller.post(&function.path, "1"), version);
    // Connections that rest must not keep the process alive either.
    let mut idle = caller.connect().await;
    let end = async {
        world.owner.arrived(2).await;
        let stop = gateway.stop("test");
        let rest = async {
            eventually("the listener is closed", || async {
                TcpStream::connect(address).await.is_err().then_some(())
            })
            .await;
            assert!(!readiness.is_ready());
            assert_eq!(read_all(&mut idle).await, "", "an idle connection is closed");
            gate.add_permits(2);
        };
        tokio::join!(stop, rest).0
    };
    let all = async { tokio::join!(call(Version::HTTP_11), call(Version::HTTP_2), end) };
    let (http1, http2, outcome) = tokio::time::timeout(Duration::from_secs(30), all).await.unwrap();
    assert_eq!((http1.status, http2.status), (200, 200));
    assert_eq!(http1.header("connection"), Some("close"), "clients are told");
    assert!(outcome.is_clean(), "{outcome:?}");
}

/// A gateway whose endpoints have a second to be forgotten.
async fn gives_notice(world: &World) -> Running {
    let gateway = start(world.dirs.path(), &world.api, &[], |config| {
        config.args.shutdown_delay = Duration::from_secs(1);
    })
    .await;
    gateway.readiness.ready().await;
    gateway
}

async fn unready(readiness: &Readiness) {
    eventually("it is not ready", || async {
        (!readiness.is_ready()).then_some(())
    })
    .await;
}

/// C-3.13
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_fails_before_the_listener_closes() {
    let world = World::start().await;
    let gateway = gives_notice(&world).await;
    let function = world.function("demo", "hello");
    let (readiness, caller) = (gateway.readiness.clone(), Caller::new(gateway.https, &world.pki));
    let seen = async {
        unready(&readiness).await;
        // A caller of its own makes a new connection.
        assert_eq!(caller.call(&function.path, "1").await.status, 200);
    };
    let (outcome, ()) = tokio::join!(gateway.stop("test"), seen);
    assert!(outcome.is_clean(), "{outcome:?}");
}

/// C-3.13: clients are told. A connection that is kept learns with its next answer that it ends, and so is not closed under a
/// call that is on its way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_connection_ends_with_an_answer() {
    let world = World::start().await;
    let gateway = gives_notice(&world).await;
    let function = world.function("demo", "hello");
    let readiness = gateway.readiness.clone();
    let mut kept = Caller::new(gateway.https, &world.pki).connect().await;
    let request = head(&function.path, "Content-Length: 1\r\n") + "1";
    kept.write_all(request.as_bytes()).await.unwrap();
    // The answer is its own input.
    let first = read_until(&mut kept, "\r\n\r\n1").await.to_lowercase();
    assert!(!first.contains("connection: close"), "{first}");
    let seen = async {
        unready(&readiness).await;
        kept.write_all(request.as_bytes()).await.unwrap();
        let last = read_all(&mut kept).await;
        assert!(
            last.starts_with("HTTP/1.1 200 ") && last.to_lowercase().contains("connection: close"),
            "{last}"
        );
    };
    let (outcome, ()) = tokio::join!(gateway.stop("test"), seen);
    assert!(outcome.is_clean(), "{outcome:?}");
}

/// C-3.13
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_never_ends_is_cut_off_after_the_grace_period() {
    let world = World::start().await;
    let gateway = start(
        world.dirs.path(),
        &world.api,
        &["--grace-period", "300ms"],
        |_| {},
    )
    .await;
    gateway.readiness.ready().await;
    let function = world.function("demo", "hello");
    world.owner.answers(|_| std::future::pending());
    let mut stream = Caller::new(gateway.https, &world.pki).connect().await;
    let request = head(&function.path, "Content-Length: 1\r\n") + "1";
    stream.write_all(request.as_bytes()).await.unwrap();
    world.owner.arrived(1).await;
    let outcome = gateway.stop("test").await;
    assert!(!outcome.is_clean() && outcome.unfinished > 0, "{outcome:?}");
}

/// C-3.13: clients are told: GOAWAY, and close.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_is_told_before_its_connection_closes() {
    let world = World::start().await;
    let gateway = start(world.dirs.path(), &world.api, &[], |_| {}).await;
    gateway.readiness.ready().await;
    let function = world.function("demo", "hello");
    let gate = world.owner.gate();
    let mut idle = Frames::over(&world, TcpStream::connect(gateway.https).await.unwrap()).await;
    let mut busy = Frames::over(&world, TcpStream::connect(gateway.https).await.unwrap()).await;
    let token = format!("Bearer {ALICE}");
    let fields = [
        ("authorization", token.as_str()),
        ("content-type", "application/json"),
    ];
    busy.head(1, "POST", &function.path, &fields, false).await;
    busy.data(1, b"7", true).await;
    world.owner.arrived(1).await;
    let told = async |frames: &mut Frames| {
        while let Some(frame) = frames.next().await {
            if frame.kind == GOAWAY {
                return true;
            }
        }
        false
    };
    let seen = async {
        assert!(told(&mut idle).await && told(&mut busy).await);
        gate.add_permits(1);
        // The call that ran is answered, and then the connection ends.
        let ended = busy.ended(1).await;
        assert_eq!(ended.body.as_deref(), Some(&b"7"[..]));
    };
    let (outcome, ()) = tokio::join!(gateway.stop("test"), seen);
    assert!(outcome.is_clean(), "{outcome:?}");
}
