//! How long a call may take, and what happens when its caller leaves (C-3.8, C-3.9; bug scenarios 37, 39, 40).

use http::Version;
use http_body_util::Full;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kruntimes_api::fixtures;
use kruntimes_proto::executor::InvokeFunctionRequest;
use tokio::io::AsyncWriteExt as _;

use crate::common::{World, caller::head, eventually, metric, owner};

/// What the owner was told for a call with this header, milliseconds.
async fn told(world: &World, path: &str, header: Option<&str>) -> i64 {
    let caller = world.caller();
    let request = match header {
        Some(value) => caller.with(path, "x-kruntime-timeout-millis", value),
        None => caller.post(path, "1"),
    };
    assert_eq!(caller.send(request, Version::HTTP_11).await.status, 200);
    world.owner.calls().last().unwrap().1.timeout_millis
}

/// C-3.9: the header, else the default; zero is the default; both at most the maximum.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_owner_is_told_the_deadline_that_is_left() {
    let flags = ["--default-timeout", "20s", "--max-timeout", "100s"];
    let world = World::with(&flags, |_| {}).await;
    let function = world.function("demo", "hello");
    for (header, most) in [
        (None, 20_000),
        (Some("0"), 20_000),
        (Some("1500"), 1_500),
        (Some("60000"), 60_000),
        (Some("100001"), 100_000),
        (Some("99999999999999999999"), 100_000),
    ] {
        let millis = told(&world, &function.path, header).await;
        // Some of it went by on the way here, never all.
        assert!((most - 1_400..=most).contains(&millis), "{header:?}: {millis}");
    }
}

/// C-3.9: at most the Run's remaining life.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_call_outlives_the_reservation() {
    let world = World::start().await;
    #[expect(clippy::disallowed_methods, reason = "the API server's clock, in this test")]
    let now = Timestamp::try_from(std::time::SystemTime::now()).unwrap();
    let living = |name: &str, since: SignedDuration| {
        let started = now.checked_sub(since).unwrap();
        let run = fixtures::run("demo", name)
            .ready_on("pod-a")
            .owner(&world.owner.address(), &world.owner.key())
            .with(|run| {
                run.spec.timeout = Some("100s".to_owned());
                run.status.as_mut().unwrap().start_time = Some(MicroTime(started));
            });
        world.put(&run.build()).path
    };
    let ends_soon = living("soon", SignedDuration::from_secs(90));
    let millis = told(&world, &ends_soon, None).await;
    assert!((1..=10_000).contains(&millis), "{millis}");
    let millis = told(&world, &ends_soon, Some("2000")).await;
    assert!((1..=2_000).contains(&millis), "{millis}");
    // The owner ends it; a clock that is ahead here must not make a call impossible.
    let over = living("over", SignedDuration::from_secs(101));
    let caller = world.caller();
    eventually("a millisecond is enough once", || async {
        let answer = caller.call(&over, "1").await;
        (answer.status == 200).then_some(())
    })
    .await;
    assert_eq!(world.owner.calls().last().unwrap().1.timeout_millis, 1);
    let ends_late = living("late", SignedDuration::from_secs(1));
    let millis = told(&world, &ends_late, None).await;
    assert!((28_000..=30_000).contains(&millis), "{millis}");
}

/// C-3.5, C-3.9: 504 as JSON from the limit that is configured, though the owner says nothing; scenario 37. And the
/// next call gets its own answer; scenario 39.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_is_504_and_the_next_call_is_its_own() {
    let world = World::with(&["--default-timeout", "200ms"], |_| {}).await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    world.owner.answers(|request: InvokeFunctionRequest| async move {
        if request.input == "\"A\"" {
            std::future::pending::<()>().await;
        }
        owner::echo(request)
    });
    let says = (504, "DeadlineExceeded", "gateway", "unknown");
    caller
        .refused(|| caller.post(&function.path, "\"A\""), says)
        .await;
    let asked = || {
        let mut request = caller.with(&function.path, "x-kruntime-timeout-millis", "100");
        *request.body_mut() = Full::from("\"A\"");
        request
    };
    caller.refused(asked, says).await;
    for version in [Version::HTTP_11, Version::HTTP_2] {
        let next = caller.send(caller.post(&function.path, "\"B\""), version).await;
        assert_eq!(next.text(), "\"B\"");
    }
    // The owner learned of each that it was given up.
    world.owner.ended(6).await;
}

/// C-3.8; scenario 40: over both versions the owner is told, and the place of the call is free again. What the owner
/// does then is its Runtime's `onCallerGone`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_learns_that_its_caller_is_gone() {
    let world = World::with(&["--max-in-flight", "1"], |_| {}).await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    world.owner.answers(|_| std::future::pending());
    let mut stream = caller.connect().await;
    let request = head(&function.path, "Content-Length: 1\r\n") + "1";
    stream.write_all(request.as_bytes()).await.unwrap();
    world.owner.arrived(1).await;
    drop(stream);
    world.owner.ended(1).await;
    // Over HTTP/2 the stream is reset and the connection stays.
    let call = async {
        eventually("the place is free", || async {
            (metric(&world.gateway, "kruntimes_gateway_calls_in_flight").await == 0.0).then_some(())
        })
        .await;
        caller
            .try_send(caller.post(&function.path, "1"), Version::HTTP_2)
            .await
    };
    tokio::select! {
        _ = call => panic!("nobody answers"),
        () = world.owner.arrived(2) => {}
    }
    world.owner.ended(2).await;
    world
        .owner
        .answers(|request| std::future::ready(owner::echo(request)));
    eventually("the only place is free again", || async {
        let answer = caller.call(&function.path, "2").await;
        (answer.status == 200).then_some(())
    })
    .await;
}
