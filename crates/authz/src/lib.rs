//! May this caller use this Run? One code for gateway and owner.
