//! Pages of a browser: what they may not do without being told so (scenario 44).

use http::{Method, Version};

use crate::common::World;

/// C-3.5, scenario 44: no origin is allowed anything. A preflight is a method like any other that is not served, and an
/// answer names no origin, so that no page can read it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_page_of_a_browser_can_call_or_read() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    for version in [Version::HTTP_11, Version::HTTP_2] {
        let mut preflight = caller.ask(Method::OPTIONS, &function.path);
        let mut call = caller.post(&function.path, "1");
        for (name, value) in [
            ("origin", "https://page.example"),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization, content-type"),
        ] {
            preflight.headers_mut().insert(name, value.parse().unwrap());
            call.headers_mut().insert(name, value.parse().unwrap());
        }
        let asked = caller.send(preflight, version).await;
        assert_eq!(
            (asked.status, asked.header("allow")),
            (405, Some("POST")),
            "{version:?}"
        );
        let answered = caller.send(call, version).await;
        assert_eq!(answered.status, 200, "{version:?}");
        for answer in [asked, answered] {
            let told = answer
                .headers
                .keys()
                .find(|name| name.as_str().starts_with("access-control-"));
            assert_eq!(told, None, "{version:?}");
        }
    }
    assert_eq!(world.owner.calls().len(), 2);
}
