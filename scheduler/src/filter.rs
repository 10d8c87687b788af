//! Which Pods could take a Run, and why the others cannot.

use kruntimes_api::run::{AffinityTerm, LabelOperator, LabelSelector};

use crate::{
    cycle::Ask,
    facts::fits,
    snapshot::{Candidate, Labels, Snapshot},
};

/// Why a Pod cannot take a Run. In the order of the checks: what comes later came closer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rejection {
    /// Not serving, or without a fresh heartbeat.
    NotAvailable,
    /// Its Runtime Server does not support the Run's mode.
    ModeUnsupported,
    /// No room.
    Full,
    /// A required neighbour is not there.
    Affinity,
    /// A neighbour that must not be there is.
    AntiAffinity,
}

/// Whether `pod` could take the Run.
///
/// # Errors
/// The first check that fails.
pub fn feasible(ask: &Ask, pod: &Candidate, snapshot: &Snapshot) -> Result<(), Rejection> {
    if !pod.available {
        return Err(Rejection::NotAvailable);
    }
    if !pod.supports(ask.mode) {
        return Err(Rejection::ModeUnsupported);
    }
    if !fits(&ask.demand, &pod.used, &pod.capacity) {
        return Err(Rejection::Full);
    }
    if !ask
        .affinity
        .iter()
        .all(|term| is_beside(ask, term, pod, snapshot))
    {
        return Err(Rejection::Affinity);
    }
    if ask.anti_affinity.iter().any(|term| has(pod, term)) {
        return Err(Rejection::AntiAffinity);
    }
    Ok(())
}

/// Whether a Run that the term selects is on the Pod.
pub fn has(pod: &Candidate, term: &AffinityTerm) -> bool {
    pod.neighbours
        .iter()
        .any(|labels| selects(&term.label_selector, labels))
}

/// The first of a group has nobody to be beside: a term that selects the Run itself holds
/// anywhere while no Run it selects exists.
fn is_beside(ask: &Ask, term: &AffinityTerm, pod: &Candidate, snapshot: &Snapshot) -> bool {
    has(pod, term)
        || (selects(&term.label_selector, &ask.labels) && !snapshot.pods.iter().any(|other| has(other, term)))
}

/// Label selector as in Kubernetes; every requirement must hold.
pub fn selects(selector: &LabelSelector, labels: &Labels) -> bool {
    let exact = selector
        .match_labels
        .iter()
        .flatten()
        .all(|(key, value)| labels.get(key) == Some(value));
    exact
        && selector.match_expressions.iter().flatten().all(|it| {
            let value = labels.get(&it.key);
            let listed = || value.is_some_and(|value| it.values.iter().flatten().any(|known| known == value));
            match it.operator {
                LabelOperator::In => listed(),
                LabelOperator::NotIn => !listed(),
                LabelOperator::Exists => value.is_some(),
                LabelOperator::DoesNotExist => value.is_none(),
            }
        })
}

#[cfg(test)]
mod tests {
    use kruntimes_api::{Run, fixtures, quantity::Amount};
    use serde_json::{Value, json};

    use super::*;

    fn ask(affinity: Value, labels: &[(&str, &str)]) -> Ask {
        let run: Run = fixtures::run("ns", "n")
            .with(|it| {
                it.spec.affinity = serde_json::from_value(affinity).unwrap();
                it.metadata.labels = Some(labels.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect());
            })
            .build();
        Ask::of(&run).unwrap()
    }

    fn beside(app: &str) -> Value {
        json!([{ "labelSelector": { "matchLabels": { "app": app } }, "topologyKey": "kruntimes.io/runtime-pod" }])
    }

    fn pods() -> Snapshot {
        let mut with_db = Candidate::free("with-db", &[("runs", 2)]);
        with_db.neighbours = vec![Labels::from([("app".to_owned(), "db".to_owned())])];
        with_db.used.insert("runs".to_owned(), Amount::whole(1));
        Snapshot {
            pods: vec![Candidate::free("empty", &[("runs", 2)]), with_db],
        }
    }

    fn verdicts(ask: &Ask, snapshot: &Snapshot) -> Vec<Result<(), Rejection>> {
        snapshot
            .pods
            .iter()
            .map(|pod| feasible(ask, pod, snapshot))
            .collect()
    }

    /// C-7.1
    #[test]
    fn checks_come_in_order() {
        let plain = ask(Value::Null, &[]);
        let mut snapshot = pods();
        assert_eq!(verdicts(&plain, &snapshot), [Ok(()), Ok(())]);
        snapshot.pods[0].used.insert("runs".to_owned(), Amount::whole(2));
        assert_eq!(verdicts(&plain, &snapshot)[0], Err(Rejection::Full));
        snapshot.pods[0].modes.clear();
        assert_eq!(verdicts(&plain, &snapshot)[0], Err(Rejection::ModeUnsupported));
        snapshot.pods[0].available = false;
        assert_eq!(verdicts(&plain, &snapshot)[0], Err(Rejection::NotAvailable));
    }

    /// C-7.1: required affinity.
    #[test]
    fn required_neighbours_and_forbidden_ones() {
        let terms = |kind: &str, app: &str| json!({ kind: { "requiredDuringSchedulingIgnoredDuringExecution": beside(app) } });
        let near = ask(terms("runAffinity", "db"), &[]);
        assert_eq!(verdicts(&near, &pods()), [Err(Rejection::Affinity), Ok(())]);
        let apart = ask(terms("runAntiAffinity", "db"), &[]);
        assert_eq!(verdicts(&apart, &pods()), [Ok(()), Err(Rejection::AntiAffinity)]);
        let nobody = ask(terms("runAffinity", "cache"), &[]);
        assert_eq!(verdicts(&nobody, &pods()), [Err(Rejection::Affinity); 2]);
    }

    #[test]
    fn the_first_of_a_group_may_go_anywhere_and_the_second_may_not() {
        let terms =
            json!({ "runAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": beside("cache") } });
        let first = ask(terms.clone(), &[("app", "cache")]);
        assert_eq!(verdicts(&first, &pods()), [Ok(()), Ok(())]);
        let mut seeded = pods();
        seeded.pods[0].neighbours.push(first.labels);
        assert_eq!(
            verdicts(&ask(terms, &[("app", "cache")]), &seeded),
            [Ok(()), Err(Rejection::Affinity)]
        );
    }

    #[test]
    fn selectors_mean_what_kubernetes_means() {
        let labels = Labels::from([("tier".to_owned(), "web".to_owned())]);
        for (operator, key, values, holds) in [
            ("In", "tier", json!(["web", "api"]), true),
            ("In", "tier", json!(["api"]), false),
            ("NotIn", "tier", json!(["web"]), false),
            ("NotIn", "absent", json!(["web"]), true),
            ("Exists", "tier", Value::Null, true),
            ("Exists", "absent", Value::Null, false),
            ("DoesNotExist", "tier", Value::Null, false),
            ("DoesNotExist", "absent", Value::Null, true),
        ] {
            let selector = serde_json::from_value(
                json!({ "matchExpressions": [{ "key": key, "operator": operator, "values": values }] }),
            )
            .unwrap();
            assert_eq!(selects(&selector, &labels), holds, "{operator} {key}");
        }
    }
}
