//! Who may call, and what is asked of Kubernetes for it (C-3.6, C-1.2).

use crate::common::{ALICE, Api, Caller, MALLORY, World, config, pki, start};
use bytes::Bytes;
use http::{Request, Version};
use http_body_util::Full;
use kruntimes_gateway::app;

fn by(caller: &Caller, path: &str, token: &str) -> Request<Full<Bytes>> {
    let mut request = caller.request(path).body("1".into()).unwrap();
    request
        .headers_mut()
        .insert("authorization", format!("Bearer {token}").parse().unwrap());
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_is_401_and_a_stranger_403() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let garbage = caller.both(|| by(&caller, &function.path, "garbage")).await;
    assert_eq!(
        (garbage.status, garbage.reason().as_str()),
        (401, "Unauthenticated")
    );
    assert!(garbage.header("www-authenticate").unwrap().starts_with("Bearer "));
    let stranger = caller.both(|| by(&caller, &function.path, MALLORY)).await;
    assert_eq!(
        (stranger.status, stranger.reason().as_str()),
        (403, "PermissionDenied")
    );
    for answer in [garbage, stranger] {
        assert_eq!(answer.dispatched(), "no");
        assert!(!answer.text().contains("garbage") && !answer.text().contains(MALLORY));
    }
    assert!(world.owner.calls().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kept_answer_asks_nobody_c_1_2() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    let (reviews, reads) = (world.api.reviews(), world.api.reads());
    for _ in 0..20 {
        assert_eq!(
            caller.both(|| by(&caller, &function.path, ALICE)).await.status,
            200
        );
    }
    assert_eq!((world.api.reviews(), world.api.reads()), (reviews, reads));
    assert_eq!(reviews, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_and_functions_are_kept_apart() {
    let world = World::start().await;
    let (one, two) = (world.function("demo", "one"), world.function("demo", "two"));
    let caller = world.caller();
    for round in 0..20 {
        let path = if round % 2 == 0 { &one.path } else { &two.path };
        let allowed = caller.send(by(&caller, path, ALICE), Version::HTTP_2);
        let denied = caller.send(by(&caller, path, MALLORY), Version::HTTP_2);
        let (allowed, denied) = tokio::join!(allowed, denied);
        assert_eq!((allowed.status, denied.status), (200, 403));
    }
    assert_eq!(world.api.reviews(), 4, "one for each token and function");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_review_is_503_and_what_is_kept_goes_on() {
    let world = World::start().await;
    let (one, two) = (world.function("demo", "one"), world.function("demo", "two"));
    let caller = world.caller();
    assert_eq!(caller.call(&one.path, "1").await.status, 200);
    // It must be known before the API goes away.
    assert_eq!(
        caller.both(|| by(&caller, &two.path, "garbage")).await.status,
        401
    );
    world.api.down(true);
    assert_eq!(caller.call(&one.path, "1").await.status, 200);
    let answer = caller.both(|| by(&caller, &two.path, ALICE)).await;
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_with_an_identity_is_refused_at_start_c_3_6() {
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
        caller
            .both(|| by(&caller, &function.path, "garbage"))
            .await
            .status,
        401
    );
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
}

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
    crate::common::eventually("the owner is reached", || async {
        (caller.call(&function.path, "1").await.status == 200).then_some(())
    })
    .await;
    let _ = pki::write;
}
