//! Paths and headers as nobody should send them (C-3, C-3.2; bug scenarios 30 and 32).

use http::Version;

use crate::common::{World, caller::head};

/// C-3.5: any `%`, `//`, dot segment, trailing slash or other case is 404, the query is ignored; scenario 30.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_exact_route() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let good = function.path.as_str();
    for query in ["", "?x=1", "?%2e%2e/:invoke", "?"] {
        let path = format!("{good}{query}");
        assert_eq!(
            caller.both(|| caller.post(&path, "1")).await.status,
            200,
            "{path}"
        );
    }
    for bad in [
        format!("{good}/"),
        good.replace(":invoke", "%3Ainvoke"),
        good.replace(":invoke", ":Invoke"),
        good.replace(":invoke", ":invoke%00"),
        good.replace("/v1/", "/v1/./"),
        good.replace("/v1/", "//v1/"),
        good.replace("/v1/", "/x/../v1/"),
        good.replace("/v1/", "/%2e%2e/v1/"),
        good.replace("/v1/", "/V1/"),
        good.replace("demo", "d%65mo"),
        good.replace(&function.uid, &function.uid.to_uppercase()),
        "/".to_owned(),
        "/readyz".to_owned(),
        "/metrics".to_owned(),
    ] {
        caller
            .refused(|| caller.post(&bad, "1"), (404, "NoSuchRoute", "gateway", "no"))
            .await;
    }
    // As no client library sends it.
    for bad in ["*", "http://x/", "/\u{e9}", "/v1/<script>"] {
        let request = head(bad, "Content-Length: 1\r\nConnection: close\r\n") + "1";
        let answer = caller.raw(request.as_bytes()).await;
        let fine = ["404", "400"]
            .iter()
            .any(|status| answer.starts_with(&format!("HTTP/1.1 {status} ")));
        assert!(fine && !answer.contains("<script>"), "{bad}: {answer}");
    }
    assert_eq!(world.owner.calls().len(), 8);
}

/// C-3.2; scenario 32: what comes back is what was sent, or a new id; never a header more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_odd_invocation_id_is_data_or_400() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    for odd in [
        "\"<script>alert(1)</script>",
        "%0d%0aX-Mine:1",
        "a/../b?c",
        "{}$(id)`",
        &"a".repeat(128),
    ] {
        let answer = caller
            .both(|| caller.with(&function.path, "x-kruntime-invocation-id", odd))
            .await;
        assert_eq!(
            (answer.status, answer.header("x-kruntime-invocation-id")),
            (200, Some(odd))
        );
        assert!(answer.header("x-mine").is_none());
        assert_eq!(world.owner.calls().last().unwrap().1.invocation_id, odd);
    }
    let calls = world.owner.calls().len();
    let long = "a".repeat(129);
    for bad in [&b"\xff"[..], "é".as_bytes(), long.as_bytes(), b"a b", b""] {
        caller
            .refused(
                || caller.with(&function.path, "x-kruntime-invocation-id", bad),
                (400, "InvalidInvocationId", "gateway", "no"),
            )
            .await;
    }
    assert_eq!(world.owner.calls().len(), calls);
}

/// C-3.5, C-3.6; scenarios 32 and 55.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_authorization_that_is_no_text_is_401() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    for bad in [&b"Bearer \xff"[..], b"\xff", b"Bearer a\xc3\xa9"] {
        caller
            .refused(
                || caller.with(&function.path, "authorization", bad),
                (401, "Unauthenticated", "gateway", "no"),
            )
            .await;
    }
    let long = format!("Bearer {}", "a".repeat(20_000));
    caller
        .refused(
            || caller.with(&function.path, "authorization", &long),
            (401, "Unauthenticated", "gateway", "no"),
        )
        .await;
    assert_eq!(world.api.reviews(), 0);
}

/// C-3.2: an id that is repeated is no id, and neither is answered under it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_id_is_400_also_in_a_head_that_is_broken() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let twice = "X-Kruntime-Invocation-ID: mine\r\nx-kruntime-invocation-id: mine\r\n";
    for rest in [
        "Connection: close\r\nContent-Length: 1\r\n",
        "Content-Length: 1\r\nContent-Length: 2\r\n",
        "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n",
    ] {
        let request = head(&function.path, &format!("{twice}{rest}")) + "1";
        let answer = caller.raw(request.as_bytes()).await.to_lowercase();
        assert!(answer.starts_with("http/1.1 400 "), "{rest}: {answer}");
        assert!(
            answer.contains("x-kruntime-invocation-id: inv_"),
            "{rest}: {answer}"
        );
        assert_eq!(answer.matches("x-kruntime-invocation-id:").count(), 1);
    }
    // A single one is kept, also then.
    let once = "X-Kruntime-Invocation-ID: mine\r\nContent-Length: 1\r\nContent-Length: 2\r\n";
    let answer = caller
        .raw((head(&function.path, once) + "1").as_bytes())
        .await
        .to_lowercase();
    assert!(answer.contains("x-kruntime-invocation-id: mine\r\n"), "{answer}");
}

/// C-3.5: heads have a limit; garbage is answered or closed, and nobody else notices.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_have_a_limit() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let long = head(&function.path, &format!("X-Long: {}\r\n", "a".repeat(70_000)));
    let many = head(&function.path, &"X-Many: 1\r\n".repeat(300));
    for request in [long, many] {
        let answer = caller.raw(request.as_bytes()).await;
        let start = &answer[..answer.len().min(300)];
        assert!(answer.starts_with("HTTP/1.1 431 "), "{start}");
        assert!(answer.contains("\"reason\":\"HeadersTooLarge\""), "{start}");
    }
    for garbage in [
        "\r\n\r\n\r\n\0\0\r\n\r\n",
        "GET\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let answer = caller.raw(garbage.as_bytes()).await;
        assert!(
            answer.starts_with("HTTP/1.1 400 ") || answer.starts_with("HTTP/1.1 404 "),
            "{garbage:?}: {answer}"
        );
    }
    assert_eq!(
        caller
            .send(caller.post(&function.path, "1"), Version::HTTP_2)
            .await
            .status,
        200
    );
}
