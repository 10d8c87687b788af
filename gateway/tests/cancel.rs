//! Ending a call (C-3.10).

use http::{Method, Version};
use kruntimes_api::fixtures;

use crate::common::{ALICE, BOB, MALLORY, World, caller::Answer, eventually};

async fn cancel(world: &World, path: &str, version: Version) -> Answer {
    let caller = world.caller();
    caller.send(caller.ask(Method::DELETE, path), version).await
}

/// C-3.10: its caller gets 499 `Cancelled`, dispatched yes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_call_is_ended_and_its_caller_told() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    world.owner.answers(|_| std::future::pending());
    for (number, version) in [(1, Version::HTTP_11), (2, Version::HTTP_2)] {
        let id = format!("call:{number}");
        let call = caller.send(
            caller.with(&function.path, "x-kruntime-invocation-id", &id),
            version,
        );
        let ending = async {
            world.owner.arrived(number).await;
            cancel(&world, &function.invocation(&id), version).await
        };
        let (called, ended) = tokio::join!(call, ending);
        assert_eq!((called.status, called.reason().as_str()), (499, "Cancelled"));
        assert_eq!(called.dispatched(), "yes");
        assert_eq!(called.header("x-kruntime-invocation-id"), Some(id.as_str()));
        assert_eq!((ended.status, &ended.body[..]), (204, &b""[..]));
        assert_ne!(
            ended.header("x-kruntime-invocation-id"),
            Some(id.as_str()),
            "a request of its own"
        );
        assert_eq!(ended.header("content-length"), None);
    }
}

/// C-3.10: 404 when no such call runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_to_end_is_404() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let pending = world.put(&fixtures::run("demo", "pending").build());
    let caller = world.caller();
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    let done = world.owner.calls()[0].1.invocation_id.clone();
    for path in [
        function.invocation("never"),
        function.invocation(&done),
        pending.invocation("never"),
    ] {
        caller
            .refused(
                || caller.ask(Method::DELETE, &path),
                (404, "NoSuchInvocation", "gateway", "no"),
            )
            .await;
    }
    let nobody = function
        .invocation("a")
        .replace(&function.uid, &fixtures::uid("nobody"));
    caller
        .refused(
            || caller.ask(Method::DELETE, &nobody),
            (404, "NoSuchFunction", "gateway", "no"),
        )
        .await;
    let kinds: Vec<&str> = world.owner.asked().iter().map(|(kind, _)| *kind).collect();
    assert_eq!(
        kinds, ["cancel"; 4],
        "nobody is asked about a Run that nobody holds"
    );
}

/// C-3.10: verb `update` on the Run, whatever one may call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_may_only_call_may_not_end_the_calls_of_others() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    assert_eq!(
        caller
            .send(caller.by(&function.path, BOB), Version::HTTP_2)
            .await
            .status,
        200
    );
    let path = function.invocation("a");
    let by = |token: &str| {
        let mut request = caller.ask(Method::DELETE, &path);
        let token = format!("Bearer {token}").parse().unwrap();
        request.headers_mut().insert("authorization", token);
        request
    };
    for token in [BOB, MALLORY] {
        let answer = caller
            .refused(|| by(token), (403, "PermissionDenied", "gateway", "no"))
            .await;
        assert!(answer.text().contains("`update`"), "{}", answer.text());
    }
    caller
        .refused(|| by("garbage"), (401, "Unauthenticated", "gateway", "no"))
        .await;
    assert!(world.owner.asked().is_empty());
}

/// Contract 4: the owner gets the fence, and the token to ask again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_owner_can_judge_for_itself() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    assert_eq!(
        cancel(&world, &function.invocation("a"), Version::HTTP_11)
            .await
            .status,
        404
    );
    let asked = world.owner.asked();
    let (_, metadata) = &asked[0];
    for (name, value) in [
        ("authorization", format!("Bearer {ALICE}")),
        ("kruntime-attempt", "1".to_owned()),
        ("kruntime-pod-uid", fixtures::uid("pod-a")),
        ("kruntime-hop", "1".to_owned()),
    ] {
        assert_eq!(metadata.get(name).unwrap().to_str().unwrap(), value);
    }
}

/// C-3.10: a draining owner may still run a call; a full gateway is no reason to let one run on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_of_a_function_that_takes_no_more_can_be_ended() {
    let world = World::with(&["--max-in-flight", "1"], |_| {}).await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    world.owner.answers(|_| std::future::pending());
    let call = caller.send(
        caller.with(&function.path, "x-kruntime-invocation-id", "a"),
        Version::HTTP_2,
    );
    let ending = async {
        world.owner.arrived(1).await;
        let draining = fixtures::run("demo", "hello")
            .ready_on("pod-a")
            .owner(&world.owner.address(), &world.owner.key())
            .not_ready("Draining");
        world.api.put(&draining.build());
        eventually("it is known to drain", || async {
            let answer = caller.call(&function.path, "1").await;
            (answer.reason() == "Draining").then_some(())
        })
        .await;
        cancel(&world, &function.invocation("a"), Version::HTTP_11).await
    };
    let (called, ended) = tokio::join!(call, ending);
    assert_eq!((called.status, ended.status), (499, 204));
}

/// C-3.10: nobody knows whether it was ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_cannot_be_reached_is_503() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    world.owner.stop();
    let path = function.invocation("a");
    eventually("the owner is found to be gone", || async {
        let answer = caller
            .send(caller.ask(Method::DELETE, &path), Version::HTTP_11)
            .await;
        (answer.reason() == "OwnerUnreachable").then_some(())
    })
    .await;
}
