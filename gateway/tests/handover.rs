//! A function that one Pod hands over to another while it is called (C-3.7, C-6.4, C-7.2).

use crate::common::{Function, Owner, World, eventually, metric};
use kruntimes_api::{Run, fixtures};
use kruntimes_proto::failure::{Failure, Reason};

/// Ready at that owner, in this attempt.
fn owned(owner: &Owner, attempt: i32) -> fixtures::RunBuilder {
    fixtures::run("demo", "hello")
        .attempt(attempt)
        .ready_on(&format!("pod-{attempt}"))
        .owner(&owner.address(), &owner.key())
}

/// What Kubernetes shows of it on its way: the first owner has said that it gives it back, then it waits for another one,
/// which registers it.
fn on_its_way(old: &Owner, new: &Owner) -> [Run; 3] {
    [
        owned(old, 1).not_ready("Draining").build(),
        owned(old, 1).not_ready("Recovering").build(),
        owned(new, 2).not_ready("Registering").build(),
    ]
}

fn draining(owner: &Owner) {
    let refusal = Failure::new(Reason::Draining, "this Pod hands its functions over");
    owner.answers(move |_| std::future::ready(Err(refusal.to_status())));
}

/// The gateway's news is late: the owner itself refuses the call, which then goes to the next owner.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_comes_too_late_follows_its_function() {
    let world = World::with(&["--handover-wait", "60s"], |_| {}).await;
    let old = Owner::start(&world.pki).await;
    let function = world.put(&owned(&old, 1).build());
    let caller = world.caller();
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    draining(&old);
    let moving = async {
        old.arrived(2).await;
        for run in on_its_way(&old, &world.owner) {
            world.api.put(&run);
        }
        world.api.put(&owned(&world.owner, 2).build());
    };
    let (answer, ()) = tokio::join!(caller.call(&function.path, "2"), moving);
    assert_eq!((answer.status, answer.text()), (200, "2"));
    assert_eq!((old.calls().len(), world.owner.calls().len()), (2, 1));
}

/// The gateway knows it: nobody is asked until the next owner is known.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_waits_while_its_function_is_on_its_way() {
    let world = World::with(&["--handover-wait", "60s"], |_| {}).await;
    let old = Owner::start(&world.pki).await;
    let function = world.put(&owned(&old, 1).build());
    let caller = world.caller();
    for run in on_its_way(&old, &world.owner) {
        world.api.put(&run);
    }
    known(&world, &function, "Registering").await;
    let moving = async {
        eventually("the call waits", || async {
            (metric(&world.gateway, "kruntimes_gateway_calls_in_flight").await > 0.0).then_some(())
        })
        .await;
        world.api.put(&owned(&world.owner, 2).build());
    };
    let (answer, ()) = tokio::join!(caller.call(&function.path, "1"), moving);
    assert_eq!((answer.status, answer.text()), (200, "1"));
    assert_eq!((old.calls().len(), world.owner.calls().len()), (0, 1));
}

/// C-3.5: nobody waits for a hand-over once it is known that no Pod can take the function. The wait would be longer than
/// this test may take.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_to_nobody_is_not_waited_for() {
    let world = World::with(&["--handover-wait", "1h"], |_| {}).await;
    let old = Owner::start(&world.pki).await;
    let function = world.put(&owned(&old, 1).build());
    let caller = world.caller();
    world.api.put(&owned(&old, 1).not_ready("Draining").build());
    known(&world, &function, "Draining").await;
    let ending = async {
        eventually("the call waits", || async {
            (metric(&world.gateway, "kruntimes_gateway_calls_in_flight").await > 0.0).then_some(())
        })
        .await;
        let full = owned(&old, 1).not_ready("Recovering").waits_for("CapacityFull");
        world.api.put(&full.build());
    };
    let (answer, ()) = tokio::join!(caller.call(&function.path, "1"), ending);
    assert_eq!(answer.reason(), "Recovering");
    assert_eq!(caller.call(&function.path, "1").await.reason(), "Recovering");
}

/// C-3.5: a function that has lost its owner is none that is handed over, and with `--handover-wait 0s` none is waited
/// for. Such a wait would be longer than this test may take.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_else_is_waited_for() {
    let world = World::with(&["--handover-wait", "1h"], |_| {}).await;
    let function = world.put(&owned(&world.owner, 1).build());
    let caller = world.caller();
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    for reason in ["Recovering", "Registering"] {
        world.api.put(&owned(&world.owner, 1).not_ready(reason).build());
        known(&world, &function, reason).await;
        assert_eq!(caller.call(&function.path, "1").await.reason(), reason);
    }

    let world = World::with(&["--handover-wait", "0s"], |_| {}).await;
    let caller = world.caller();
    let function = world.put(&owned(&world.owner, 1).build());
    draining(&world.owner);
    assert_eq!(caller.call(&function.path, "1").await.reason(), "Draining");
    world
        .api
        .put(&owned(&world.owner, 1).not_ready("Draining").build());
    known(&world, &function, "Draining").await;
    assert_eq!(caller.call(&function.path, "1").await.reason(), "Draining");
}

/// Waits until the gateway has heard of it, without calling.
async fn known(world: &World, function: &Function, reason: &str) {
    let caller = world.caller();
    eventually("the news has arrived", || async {
        let page = caller.ask(http::Method::GET, &function.page());
        let page = caller.send(page, http::Version::HTTP_11).await;
        page.text().contains(reason).then_some(())
    })
    .await;
}
