//! How a gateway ends (C-3.13).

use std::{sync::Arc, time::Duration};

use crate::common::{ALICE, Caller, World, caller::read_all, owner, start};
use http::Version;
use tokio::{io::AsyncWriteExt as _, net::TcpStream, sync::Notify};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_calls_finish_and_then_it_ends_at_once() {
    let world = World::start().await;
    let gateway = start(world.dirs.path(), &world.api, &[], |_| {}).await;
    gateway.readiness.ready().await;
    let function = world.function("demo", "hello");
    let (release, readiness, address) = (Arc::new(Notify::new()), gateway.readiness.clone(), gateway.https);
    let wait = Arc::clone(&release);
    world.owner.answers(move |request| {
        let wait = Arc::clone(&wait);
        async move {
            wait.notified().await;
            owner::echo(request)
        }
    });
    let caller = Caller::new(address, &world.pki);
    let call = |version| caller.send(caller.request(&function.path).body("1".into()).unwrap(), version);
    // Connections that rest must not keep the process alive either.
    let mut idle = caller.connect().await;
    let end = async {
        world.owner.arrived(2).await;
        let stop = gateway.stop("test");
        let rest = async {
            while TcpStream::connect(address).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            assert!(!readiness.is_ready());
            assert_eq!(read_all(&mut idle).await, "", "an idle connection is closed");
            release.notify_waiters();
        };
        tokio::join!(stop, rest).0
    };
    let all = async { tokio::join!(call(Version::HTTP_11), call(Version::HTTP_2), end) };
    let (http1, http2, outcome) = tokio::time::timeout(Duration::from_secs(30), all).await.unwrap();
    assert_eq!((http1.status, http2.status), (200, 200));
    assert_eq!(http1.header("connection"), Some("close"), "clients are told");
    assert!(outcome.is_clean(), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_fails_before_the_listener_closes() {
    let world = World::start().await;
    let gateway = start(world.dirs.path(), &world.api, &[], |config| {
        config.args.shutdown_delay = Duration::from_secs(1);
    })
    .await;
    gateway.readiness.ready().await;
    let function = world.function("demo", "hello");
    let (readiness, caller) = (gateway.readiness.clone(), Caller::new(gateway.https, &world.pki));
    let seen = async {
        crate::common::eventually("it is not ready", || async {
            (!readiness.is_ready()).then_some(())
        })
        .await;
        // A caller of its own makes a new connection.
        assert_eq!(caller.call(&function.path, "1").await.status, 200);
    };
    let (outcome, ()) = tokio::join!(gateway.stop("test"), seen);
    assert!(outcome.is_clean(), "{outcome:?}");
}

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
    let request = format!(
        "POST {} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\nContent-Type: application/json\r\n\
         Content-Length: 1\r\n\r\n1",
        function.path
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    world.owner.arrived(1).await;
    let outcome = gateway.stop("test").await;
    assert!(!outcome.is_clean() && outcome.unfinished > 0, "{outcome:?}");
}
