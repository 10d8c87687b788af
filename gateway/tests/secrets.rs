//! What nobody sees: a token (C-3.6; bug scenario 56).

use http::{HeaderValue, Method, Request, Version};
use http_body_util::Full;
use kruntimes_proto::failure::{Failure, Reason};

use crate::common::{ALICE, Logs, MALLORY, World, caller::head, eventually, owner};

/// Every token that is used here.
const TOKENS: [&str; 4] = [ALICE, MALLORY, "garbage-token", "other-token"];

/// What this test's own client logs is its own matter.
fn unseen(mut request: Request<Full<bytes::Bytes>>) -> Request<Full<bytes::Bytes>> {
    if let Some(value) = request.headers_mut().get_mut("authorization") {
        value.set_sensitive(true);
    }
    request
}

/// C-3.6; scenario 56: a mix of everything that callers and owners do, with every line that there is.
#[tokio::test]
async fn no_token_in_any_line_at_any_level() {
    let logs = Logs::with_filter("trace");
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let long = format!("garbage-token{}", "x".repeat(20_000));
    for version in [Version::HTTP_11, Version::HTTP_2] {
        for request in [
            caller.post(&function.path, "1"),
            caller.by(&function.path, MALLORY),
            caller.by(&function.path, "garbage-token"),
            caller.by(&function.path, "garbage-token,x"),
            caller.by(&function.path, &long),
            caller.with(&function.path, "authorization", "Basic garbage-token"),
            caller.with(&function.path, "content-type", "text/plain"),
            caller.with(&function.path, "x-kruntime-timeout-millis", "soon"),
            caller.post("/nowhere", "1"),
            caller.post(&function.path, vec![b'1'; 1_048_577]),
            caller.ask(Method::PUT, &function.path),
            caller.ask(Method::GET, &function.page()),
            caller.ask(Method::DELETE, &function.invocation("a")),
        ] {
            let mut request = unseen(request);
            let token = request.headers().get("authorization").cloned();
            let twice = [token.unwrap_or(HeaderValue::from_static("x"))];
            let answer = caller.send(request.clone(), version).await;
            let told = answer.text();
            assert!(!TOKENS.iter().any(|token| told.contains(token)), "{told}");
            request.headers_mut().append("authorization", twice[0].clone());
            assert!((400..500).contains(&caller.send(request, version).await.status));
        }
        // What owners make of it, and owners that are none.
        for reason in [Reason::Busy, Reason::Unauthenticated, Reason::HandlerError] {
            world
                .owner
                .answers(move |_| std::future::ready(Err(Failure::new(reason, "x").to_status())));
            caller
                .send(unseen(caller.post(&function.path, "1")), version)
                .await;
        }
        world
            .owner
            .answers(|request| std::future::ready(owner::echo(request)));
        world.api.down(true);
        let fresh = world.caller();
        fresh
            .send(unseen(fresh.by(&function.path, "other-token")), version)
            .await;
        world.api.down(false);
    }
    for rest in [
        "Content-Type: x\r\n\r\n",
        "Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "\0\r\n\r\n",
        "X y: z\r\n\r\n",
    ] {
        let head = head(&function.path, "Connection: close\r\n");
        let bytes = head.trim_end_matches("\r\n").to_owned() + "\r\n" + rest;
        assert!(caller.raw(bytes.as_bytes()).await.contains(" 4"), "{rest:?}");
    }
    world.owner.stop();
    eventually("the owner is found to be gone", || async {
        let answer = caller
            .send(unseen(caller.post(&function.path, "1")), Version::HTTP_2)
            .await;
        (answer.status == 503).then_some(())
    })
    .await;
    let text = logs.text();
    for logged in ["kruntimes_gateway::access", "\"TRACE\"", "hyper_util", "h2::"] {
        assert!(text.contains(logged), "{logged} is logged");
    }
    for token in TOKENS {
        let middle = &token[2..9];
        let quoted: Vec<&str> = text.lines().filter(|line| line.contains(middle)).collect();
        assert!(quoted.is_empty(), "{quoted:#?}");
    }
}
