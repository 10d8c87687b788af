//! One page that says why a function can or cannot be called (C-3.11).

use http::{Method, Version};
use kruntimes_api::{fixtures, run::Phase};
use kruntimes_proto::owner::{ExplainResponse, RunningCall};
use serde_json::Value;
use tonic::Status;

use crate::common::{BOB, MALLORY, World, eventually};

/// The page, the same over both versions but for its age.
async fn page(world: &World, path: &str) -> Value {
    let caller = world.caller();
    let answer = caller.both(|| caller.ask(Method::GET, path)).await;
    assert_eq!(
        (answer.status, answer.header("content-type")),
        (200, Some("application/json"))
    );
    answer.json()
}

/// C-3.11
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_function_that_can_be_called_says_so_and_who_holds_it() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    world.owner.explains(Ok(ExplainResponse {
        state: "Ready".into(),
        callable: true,
        attempt: 1,
        heard_millis_ago: Some(20),
        ..ExplainResponse::default()
    }));
    let page = page(&world, &function.page()).await;
    assert_eq!(
        (page["callable"].clone(), page["reason"].clone()),
        (true.into(), "Ready".into())
    );
    assert_eq!(
        (page["namespace"].as_str(), page["name"].as_str()),
        (Some("demo"), Some("hello"))
    );
    assert_eq!(page["uid"].as_str(), Some(function.uid.as_str()));
    assert_eq!(
        page["owner"]["address"].as_str(),
        Some(world.owner.address().as_str())
    );
    assert_eq!(page["owner"]["heardMillisAgo"], 20);
    assert!(page["routeAgeMillis"].is_u64());
    assert!(world.owner.calls().is_empty(), "explaining calls nothing");
    let (kind, metadata) = &world.owner.asked()[0];
    assert_eq!(
        (*kind, metadata.get("kruntime-hop").unwrap().to_str().unwrap()),
        ("explain", "1")
    );
}

/// C-3.11: also when the Run is not Ready, from what the gateway knows by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_function_that_cannot_be_called_says_why() {
    let world = World::start().await;
    let full = fixtures::run("demo", "full").with(|run| {
        let says = kruntimes_api::status::Says {
            kind: kruntimes_api::status::SCHEDULED,
            holds: false,
            reason: "CapacityFull",
            message: "every Pod is full",
        };
        let status = run.status.get_or_insert_default();
        status.set(says, Some(1), fixtures::NOW);
    });
    let ended = fixtures::run("demo", "ended")
        .ready_on("p")
        .ended(Phase::Timeout, "IdleTimeout");
    for (run, status, reason, why) in [
        (full, 503, "Pending", "Scheduled=CapacityFull: every Pod is full"),
        (
            fixtures::run("demo", "b").running_on("p"),
            503,
            "Registering",
            "Ready=Registering",
        ),
        (ended, 410, "FunctionEnded", ""),
    ] {
        let function = world.put(&run.build());
        let page = page(&world, &function.page()).await;
        assert_eq!(
            (page["status"].clone(), page["reason"].clone()),
            (status.into(), reason.into())
        );
        assert_eq!(page["callable"], false);
        let conditions = page["conditions"].as_str().unwrap_or_default();
        assert!(conditions.contains(why), "{page}");
        assert_eq!(
            world.caller().call(&function.path, "1").await.reason(),
            reason,
            "as a call is answered"
        );
    }
}

/// C-3.11: what the owner says, and that it says nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_owner_s_side_is_on_the_page_or_that_it_is_silent() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    world.owner.explains(Ok(ExplainResponse {
        state: "Ready".into(),
        callable: false,
        reason: "Busy".into(),
        detail: "a call is running".into(),
        running: Some(RunningCall {
            invocation_id: "inv_1".into(),
            running_millis: 10,
            at_most_millis: 20,
            cancelled: false,
        }),
        ..ExplainResponse::default()
    }));
    let busy = page(&world, &function.page()).await;
    assert_eq!(
        (busy["status"].clone(), busy["reason"].clone()),
        (429.into(), "Busy".into())
    );
    assert_eq!(busy["owner"]["running"]["atMostMillis"], 20);
    // An owner of the version before.
    world.owner.explains(Err(Status::unimplemented("made up")));
    let older = page(&world, &function.page()).await;
    assert_eq!(older["reason"], "BadHop");
    assert!(!older.to_string().contains("made up"));
    world.owner.stop();
    let silent = eventually("the owner is found to be gone", || async {
        let page = page(&world, &function.page()).await;
        (page["reason"] == "OwnerUnreachable").then_some(page)
    })
    .await;
    assert_eq!(
        (silent["callable"].clone(), silent["owner"]["answers"].clone()),
        (false.into(), false.into())
    );
}

/// C-3.11: the same authorization as invoking, and the same order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_those_who_may_call_may_read_the_page() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let by = |token: &str| {
        let mut request = caller.ask(Method::GET, &function.page());
        let token = format!("Bearer {token}").parse().unwrap();
        request.headers_mut().insert("authorization", token);
        request
    };
    caller
        .refused(|| by(MALLORY), (403, "PermissionDenied", "gateway", "no"))
        .await;
    caller
        .refused(|| by("garbage"), (401, "Unauthenticated", "gateway", "no"))
        .await;
    assert_eq!(caller.send(by(BOB), Version::HTTP_2).await.status, 200);
    let nobody = function.page().replace(&function.uid, &fixtures::uid("nobody"));
    caller
        .refused(
            || caller.ask(Method::GET, &nobody),
            (404, "NoSuchFunction", "gateway", "no"),
        )
        .await;
}
