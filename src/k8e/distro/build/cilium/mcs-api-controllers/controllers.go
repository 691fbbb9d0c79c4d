// Package controllers holds the one constant of sigs.k8s.io/mcs-api/controllers that Cilium uses.
package controllers

// DerivedServiceAnnotation names the Service that stands for a ServiceImport.
const DerivedServiceAnnotation = "multicluster.kubernetes.io/derived-service"
