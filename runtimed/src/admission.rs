//! The full resource vector of this Pod: the authority on capacity (C-6.1).
//!
//! The scheduler places by what it has seen; two of its leaders, or a stale view, may place too much.
//! What does not fit here is handed back.

use std::collections::{BTreeMap, HashMap};

use kruntimes_api::{
    Run,
    keys::RunUid,
    names::RESOURCE_RUNS,
    quantity::{Amount, InvalidQuantity},
    runtime::DEFAULT_RUNS,
};

/// Amounts by resource name.
pub type Vector = BTreeMap<String, Amount>;

/// What the Pod has and who holds how much of it.
#[derive(Debug, Clone)]
pub struct Admission {
    capacity: Vector,
    held: HashMap<RunUid, Vector>,
}

/// A Run that does not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{resource}: {asked} requested, {free} of {capacity} free")]
pub struct Refused {
    /// The first resource, by name, that does not fit.
    pub resource: String,
    /// How much the Run requests.
    pub asked: Amount,
    /// How much nobody holds.
    pub free: Amount,
    /// How much the Pod has; zero for a resource it does not declare.
    pub capacity: Amount,
}

/// What `run` takes of a Pod: its requests, and one of `runs` unless it says otherwise.
///
/// # Errors
/// Names the text that is no quantity; the CRD refuses those, an older object may hold one.
pub fn requests(run: &Run) -> Result<Vector, InvalidQuantity> {
    let mut vector = Vector::from([(RESOURCE_RUNS.to_owned(), Amount::whole(1))]);
    let requests = run.spec.resources.as_ref().and_then(|it| it.requests.as_ref());
    for (name, quantity) in requests.into_iter().flatten() {
        vector.insert(name.clone(), quantity.amount()?);
    }
    Ok(vector)
}

/// Reads `--capacity`: `runs=2,memory=1Gi`. Without `runs` the Pod has two.
///
/// # Errors
/// Names the part that is wrong and what to write instead.
pub fn parse_capacity(text: &str) -> Result<Vector, String> {
    let mut capacity = Vector::new();
    for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
        let (name, amount) = pair
            .split_once('=')
            .ok_or_else(|| format!("`{pair}` is no NAME=QUANTITY; write for example runs=2,memory=1Gi"))?;
        let amount = amount
            .parse()
            .map_err(|error: InvalidQuantity| format!("{name}: {error}"))?;
        if name.is_empty() || capacity.insert(name.to_owned(), amount).is_some() {
            return Err(format!("`{pair}`: each resource has a name and is named once"));
        }
    }
    capacity
        .entry(RESOURCE_RUNS.to_owned())
        .or_insert_with(|| Amount::whole(DEFAULT_RUNS));
    Ok(capacity)
}

// === impl Admission ===

impl Admission {
    /// An empty Pod of this capacity.
    #[must_use]
    pub fn new(capacity: Vector) -> Self {
        Self {
            capacity,
            held: HashMap::new(),
        }
    }

    /// Reserves what the Run requests. A Run that holds something already keeps exactly that.
    ///
    /// # Errors
    /// When any resource does not fit; then nothing is reserved.
    pub fn admit(&mut self, run: RunUid, requests: Vector) -> Result<(), Refused> {
        if self.held.contains_key(&run) {
            return Ok(());
        }
        for (resource, asked) in &requests {
            let capacity = self.capacity.get(resource).copied().unwrap_or(Amount::ZERO);
            let free = capacity.minus(self.taken(resource));
            if *asked > free {
                return Err(Refused {
                    resource: resource.clone(),
                    asked: *asked,
                    free,
                    capacity,
                });
            }
        }
        self.held.insert(run, requests);
        Ok(())
    }

    /// Reserves for a Run that is registered here already, as after a restart: it is there, whether
    /// it fits or not.
    pub fn restore(&mut self, run: RunUid, requests: Vector) {
        self.held.entry(run).or_insert(requests);
    }

    /// Gives back what the Run holds, if anything.
    pub fn release(&mut self, run: RunUid) {
        self.held.remove(&run);
    }

    /// How much of a resource is held.
    #[must_use]
    pub fn taken(&self, resource: &str) -> Amount {
        self.held
            .values()
            .filter_map(|vector| vector.get(resource))
            .fold(Amount::ZERO, |sum, amount| sum.plus(*amount))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn uid(number: u8) -> RunUid {
        format!("00000000-0000-4000-8000-0000000000{number:02x}")
            .parse()
            .unwrap()
    }

    fn vector(pairs: &[(&str, &str)]) -> Vector {
        pairs
            .iter()
            .map(|(name, amount)| ((*name).to_owned(), amount.parse().unwrap()))
            .collect()
    }

    /// C-6.1: every resource must fit.
    #[test]
    fn every_resource_must_fit() {
        let mut pod = Admission::new(vector(&[
            ("runs", "2"),
            ("memory", "1Gi"),
            ("example.com/gpu", "1"),
        ]));
        let small = || vector(&[("runs", "1"), ("memory", "512Mi")]);
        pod.admit(uid(1), small()).unwrap();
        let refused = pod
            .admit(uid(2), vector(&[("runs", "1"), ("memory", "513Mi")]))
            .unwrap_err();
        assert_eq!(refused.resource, "memory");
        assert_eq!(
            pod.admit(uid(2), vector(&[("example.com/gpu", "2")]))
                .unwrap_err()
                .resource,
            "example.com/gpu"
        );
        let undeclared = pod.admit(uid(2), vector(&[("cpu", "1m")])).unwrap_err();
        assert_eq!(undeclared.capacity, Amount::ZERO);
        pod.admit(uid(2), small()).unwrap();
        assert_eq!(pod.admit(uid(3), small()).unwrap_err().resource, "memory");
        pod.release(uid(1));
        pod.admit(uid(3), small()).unwrap();
    }

    #[test]
    fn asking_twice_takes_once() {
        let mut pod = Admission::new(parse_capacity("runs=1").unwrap());
        pod.admit(uid(1), vector(&[("runs", "1")])).unwrap();
        pod.admit(uid(1), vector(&[("runs", "1")])).unwrap();
        assert_eq!(pod.taken("runs"), Amount::whole(1));
        pod.release(uid(1));
        pod.release(uid(1));
        assert_eq!(pod.taken("runs"), Amount::ZERO);
    }

    #[test]
    fn what_is_registered_already_counts_even_beyond_capacity() {
        let mut pod = Admission::new(parse_capacity("runs=1").unwrap());
        pod.restore(uid(1), vector(&[("runs", "1")]));
        pod.restore(uid(2), vector(&[("runs", "1")]));
        assert!(pod.admit(uid(3), vector(&[("runs", "1")])).is_err());
    }

    #[test]
    fn capacity_is_written_as_pairs() {
        assert_eq!(parse_capacity("").unwrap(), vector(&[("runs", "2")]));
        assert_eq!(
            parse_capacity("runs=3, memory=1Gi").unwrap(),
            vector(&[("runs", "3"), ("memory", "1Gi")])
        );
        for (text, needle) in [
            ("runs", "NAME=QUANTITY"),
            ("runs=x", "quantity"),
            ("runs=1,runs=2", "once"),
        ] {
            let error = parse_capacity(text).unwrap_err();
            assert!(error.contains(needle), "{text}: {error}");
        }
    }

    #[test]
    fn a_run_takes_one_of_runs_by_default() {
        let run = kruntimes_api::fixtures::run("ns", "n").build();
        assert_eq!(requests(&run).unwrap(), vector(&[("runs", "1")]));
    }

    proptest! {
        #[test]
        fn never_more_than_the_capacity(steps in proptest::collection::vec((0u8..8, 0u64..4, any::<bool>()), 0..64)) {
            let mut pod = Admission::new(parse_capacity("runs=5").unwrap());
            for (run, amount, release) in steps {
                if release {
                    pod.release(uid(run));
                } else {
                    let _ = pod.admit(uid(run), Vector::from([("runs".to_owned(), Amount::whole(amount))]));
                }
                prop_assert!(pod.taken("runs") <= Amount::whole(5));
            }
        }
    }
}
