//! Who may call, and what is asked of Kubernetes for it (C-3.6, C-1.2).

use std::time::Duration;

use base64::{Engine as _, prelude::BASE64_STANDARD};

use crate::common::{ALICE, Api, Caller, MALLORY, World, config, eventually, metric, start};
use http::Version;
use kruntimes_gateway::app;

/// C-1.2
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_answer_asks_nobody() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    let (reviews, reads) = (world.api.reviews(), world.api.reads());
    for _ in 0..20 {
        assert_eq!(caller.both(|| caller.by(&function.path, ALICE)).await.status, 200);
    }
    assert_eq!((world.api.reviews(), world.api.reads()), (reviews, reads));
    assert_eq!(reviews, 1);
}

/// C-3.6; scenario 59: no cross talk, and counted apart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_and_functions_are_kept_apart() {
    let world = World::start().await;
    let (one, two) = (world.function("demo", "one"), world.function("demo", "two"));
    let caller = world.caller();
    for round in 0..500 {
        let path = if round % 2 == 0 { &one.path } else { &two.path };
        let allowed = caller.send(caller.by(path, ALICE), Version::HTTP_2);
        let denied = caller.send(caller.by(path, MALLORY), Version::HTTP_2);
        let (allowed, denied) = tokio::join!(allowed, denied);
        assert_eq!((allowed.status, denied.status), (200, 403));
    }
    let count = async |result: &str, cached: bool| {
        let labels = format!("{{result=\"{result}\",cached=\"{cached}\"}}");
        metric(
            &world.gateway,
            &format!("kruntimes_gateway_authorizations_total{labels}"),
        )
        .await
    };
    for result in ["allowed", "denied"] {
        assert_eq!(
            count(result, false).await + count(result, true).await,
            500.0,
            "{result}"
        );
    }
    assert!(count("allowed", false).await < 20.0, "most are remembered");
}

/// C-3.5, C-3.14: API loss never makes it unready.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_review_is_503_and_what_is_kept_goes_on() {
    let world = World::start().await;
    let (one, two) = (world.function("demo", "one"), world.function("demo", "two"));
    let caller = world.caller();
    assert_eq!(caller.call(&one.path, "1").await.status, 200);
    // It must be known before the API goes away.
    assert_eq!(caller.both(|| caller.by(&two.path, "garbage")).await.status, 401);
    world.api.down(true);
    assert_eq!(caller.call(&one.path, "1").await.status, 200);
    let answer = caller.both(|| caller.by(&two.path, ALICE)).await;
    assert_eq!(
        (answer.status, answer.reason().as_str()),
        (503, "AuthorizationUnavailable")
    );
    assert!(
        world.gateway.readiness.is_ready(),
        "C-3.14: API loss never makes it unready"
    );
    world.api.down(false);
    assert_eq!(caller.call(&two.path, "1").await.status, 200);
}

/// C-3.6
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_with_an_identity_is_refused_at_start() {
    let world = World::start().await;
    let api = Api::start().await;
    // Something in between answers for everybody, as a client certificate would.
    api.allow_everybody();
    let error = app::start(config(world.dirs.path(), &[], |_| {}), api.config())
        .await
        .err()
        .unwrap();
    let text = format!("{error:#}");
    assert!(
        text.contains("refuses to start") && text.contains("identity"),
        "{text}"
    );
    assert!(text.contains("client certificate"), "the remedy: {text}");
}

/// C-3.6: garbage is 401, though the configuration has a token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_identity_in_the_configuration_does_not_reach_the_pool() {
    let world = World::start().await;
    let mut kube = world.api.config();
    kube.auth_info.token = Some(String::from(ALICE).into());
    let gateway = app::start(config(world.dirs.path(), &[], |_| {}), kube)
        .await
        .unwrap();
    gateway.readiness.ready().await;
    let function = world.function("demo", "hello");
    let caller = Caller::new(gateway.https, &world.pki);
    assert_eq!(
        caller.both(|| caller.by(&function.path, "garbage")).await.status,
        401
    );
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
}

/// Contract 4
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_waits_for_the_certificate_that_owners_know() {
    let world = World::start().await;
    let dirs = tempfile::tempdir().unwrap();
    world.pki.serve_as(dirs.path(), "one");
    let gateway = start(dirs.path(), &world.api, &[], |_| {}).await;
    let function = world.function("demo", "hello");
    let caller = Caller::new(gateway.https, &world.pki);
    let answer = caller.call(&function.path, "1").await;
    assert_eq!((answer.status, answer.dispatched().as_str()), (503, "no"));
    assert!(!gateway.readiness.is_ready());
    assert!(
        gateway
            .readiness
            .state()
            .missing()
            .any(|part| part == "peer certificate")
    );
    world.pki.be_gateway(dirs.path());
    gateway.readiness.ready().await;
    eventually("the owner is reached", || async {
        (caller.call(&function.path, "1").await.status == 200).then_some(())
    })
    .await;
}

/// C-3.6: with a client certificate in the configuration an API server would ignore a garbage token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_certificate_in_the_configuration_is_shown_to_nobody() {
    let world = World::start().await;
    let mut kube = world.api.config();
    let (cert, key) = world.pki.serving_pair("somebody");
    kube.auth_info.client_certificate_data = Some(BASE64_STANDARD.encode(cert));
    kube.auth_info.client_key_data = Some(BASE64_STANDARD.encode(key).into());
    let gateway = app::start(config(world.dirs.path(), &[], |_| {}), kube)
        .await
        .unwrap();
    gateway.readiness.ready().await;
    let function = world.function("demo", "hello");
    Caller::new(gateway.https, &world.pki)
        .refused(
            || world.caller().by(&function.path, "garbage"),
            (401, "Unauthenticated", "gateway", "no"),
        )
        .await;
}

/// C-3.6: an allowance ends with its cap, however often the function is called; scenario 51's kind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_no_longer_allowed_is_refused_though_calling_all_the_time() {
    let world = World::with(&["--authorization-opaque-ttl", "1s"], |_| {}).await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    world.api.allow(ALICE, &[]);
    let calls = async {
        let mut calls = 0;
        while caller.call(&function.path, "1").await.status == 200 {
            calls += 1;
        }
        calls
    };
    let calls = tokio::time::timeout(Duration::from_secs(20), calls)
        .await
        .unwrap();
    assert!(calls > 1, "it was kept for a while");
    assert_eq!(
        caller.call(&function.path, "1").await.reason(),
        "PermissionDenied"
    );
}
