//! News that is late, early or missing (C-3.5, C-3.14; bug scenarios 3 and 5).

use crate::common::{Function, World, eventually, metric};
use kruntimes_api::fixtures;

/// C-3.5: up to 300 ms for the table.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_function_is_callable_the_moment_its_creator_knows_it() {
    let world = World::start().await;
    let caller = world.caller();
    for number in 0..30 {
        let function = world.function("demo", &format!("f{number}"));
        assert_eq!(caller.call(&function.path, "1").await.status, 200);
    }
}

/// C-3.5; scenario 5.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_made_anew_is_another_function() {
    let world = World::start().await;
    let caller = world.caller();
    let mut before: Option<Function> = None;
    for life in 0..50 {
        let uid = fixtures::uid(&format!("life {life}"));
        let run = fixtures::run("demo", "hello")
            .uid(&uid)
            .ready_on("pod-a")
            .owner(&world.owner.address(), &world.owner.key())
            .build();
        if let Some(before) = &before {
            world.api.delete(&before.uid);
        }
        let function = world.put(&run);
        assert_eq!(caller.call(&function.path, "1").await.status, 200, "life {life}");
        if let Some(before) = &before {
            assert_eq!(caller.call(&before.path, "1").await.status, 404, "life {life}");
        }
        before = Some(function);
    }
}

/// C-2.3; scenario 3.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_news_of_a_former_owner_changes_nothing() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let owned = |attempt: i32| {
        fixtures::run("demo", "hello")
            .attempt(attempt)
            .ready_on("pod-b")
            .owner(&world.owner.address(), &world.owner.key())
    };
    world.api.put(&owned(2).build());
    eventually("the second owner is known", || async {
        assert_eq!(caller.call(&function.path, "1").await.status, 200);
        let calls = world.owner.calls();
        (calls.last().unwrap().0.get("kruntime-attempt").unwrap() == "2").then_some(())
    })
    .await;
    world.api.put(&owned(1).not_ready("Recovering").build());
    // News about another function shows that the late news has arrived.
    let later = world.function("demo", "later");
    assert_eq!(caller.call(&later.path, "1").await.status, 200);
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
}

/// C-3.14, C-1.2: a stale table keeps serving; route age is a metric; scenario 6.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routes_outlive_the_api_and_catch_up_after_it() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    world.api.down(true);
    let age = || metric(&world.gateway, "kruntimes_gateway_route_age_seconds");
    eventually("the age grows", || async { (age().await > 0.2).then_some(()) }).await;
    assert!(world.gateway.readiness.is_ready());
    let made = world.function("demo", "made-meanwhile");
    assert_eq!(
        caller.call(&function.path, "1").await.status,
        200,
        "a stale table keeps serving"
    );
    assert_eq!(caller.call(&made.path, "1").await.status, 404);
    world.api.delete(&function.uid);
    world.api.down(false);
    eventually("the new function is found", || async {
        (caller.call(&made.path, "1").await.status == 200).then_some(())
    })
    .await;
    eventually("the old function is gone", || async {
        (caller.call(&function.path, "1").await.status == 404).then_some(())
    })
    .await;
    // Each delivery makes it new again, and so does each watch that is opened every 30 s.
    let before = age().await;
    world.function("demo", "another");
    eventually("the age begins anew", || async {
        (age().await < before).then_some(())
    })
    .await;
}

/// C-7.5: `scope.namespaces`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_namespaces_that_were_asked_for() {
    let world = World::with(&["--namespaces", "a,b"], |_| {}).await;
    let caller = world.caller();
    let (a, b) = (world.function("a", "hello"), world.function("b", "hello"));
    assert_eq!(caller.call(&a.path, "1").await.status, 200);
    assert_eq!(caller.call(&b.path, "1").await.status, 200);
    let elsewhere = world.function("c", "hello");
    assert_eq!(caller.call(&elsewhere.path, "1").await.status, 404);
}
